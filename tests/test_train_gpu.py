"""The script that makes drafters on a GPU runs to its end with the toy target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_gpu.sh"


@pytest.mark.slow
def test_dry_run(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["bash", str(SCRIPT), "--dry-run", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert report["data"]["trained_tokens"] > 500
    assert [run["drafter"] for run in report["runs"]] == ["eagle3", "domino"]
    for run in report["runs"]:
        assert run["exported"] and run["steps"] == run["planned"] == 20 and run["tokens_per_second"] > 0
        assert run["acceptance_length"] >= 1.0
    found = {entry["method"]: entry["acceptance_length"] for entry in report["acceptance"]}
    assert set(found) == {"recycling", "eagle3", "graft", "dominotree"}
    assert found["recycling"] > 1.3  # filled from what the target wrote
    assert all(entry["bytes"] < 16 * 2**20 for entry in report["files"])
    again = subprocess.run(command, env=environment, timeout=900, capture_output=True, text=True)
    assert again.returncode == 0 and "data/manifest.json is there" in again.stdout
