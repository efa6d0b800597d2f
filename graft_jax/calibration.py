"""Calibration files: which gates to use with a head on a machine, and at which thresholds."""

import json
from pathlib import Path
from typing import Any

from graft_jax.io.safetensors import parse_json

VERSION = 1
# What a file fixes for the decoder, by the names of `methods.Options`.
OPTIONS = ("budget", "draft_depth", "draft_top_k", "gate_measure", "gates", "thresholds")


def write_calibration(path: str | Path, report: dict[str, Any]) -> None:
    """Writes a report that holds all `OPTIONS` and what else is worth knowing."""
    Path(path).write_text(json.dumps({"version": VERSION, **report}, indent=1) + "\n")


def read_calibration(path: str | Path, method: str) -> dict[str, Any]:
    """The options in a calibration file.

    Raises:
        ValueError: the file is missing, broken, or was made for another method.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"calibration={str(path)!r}: no such file")
    found = parse_json(path.read_bytes(), str(path))
    if found.get("version") != VERSION:
        raise ValueError(f"{path}: version {found.get('version')!r} is not a calibration file of version {VERSION}")
    missing = [name for name in OPTIONS if name not in found]
    if missing:
        raise ValueError(f"{path}: keys are missing: {', '.join(missing)}")
    if found.get("method") != method:
        raise ValueError(f"{path}: was made for method {found.get('method')!r}, not for {method!r}")
    return {name: tuple(v) if isinstance(v := found[name], list) else v for name in OPTIONS}
