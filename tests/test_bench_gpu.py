"""The accelerator's benchmark runs to its end at toy size, and its numbers are there."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_gpu.py"


def test_dry_run(tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--models", "qwen3-4b", "--methods", "recycling"]
    subprocess.run([*command, "--out", str(out)], check=True, timeout=400, capture_output=True)
    report = json.loads(out.read_text())
    assert report["dry_run"] and report["versions"]["jax"]
    assert {row["kernel"] for row in report["kernels"]} == {"topk_rows", "topm_score", "retrieval_lookup"}
    for row in report["kernels"]:
        assert row["equal"] and row["implementation"] == "pallas-triton-interpret" and row["xla_us"] > 0
    plain, made = report["rounds"]
    assert plain["method"] == "ar" and made["method"] == "recycling" and made["rows"] == 8
    stages = ("draft", "build", "verify", "accept", "commit", "update", "observe")
    assert all(made[f"{stage}_ms"] > 0 for stage in stages) and made["round_ms"] > 0
    assert {goal["goal"] for goal in report["goals"]} >= {"table update and commit"}
