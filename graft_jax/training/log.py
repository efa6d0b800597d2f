"""The record of a run: JSON lines, and a progress line for people."""

import json
import os
from pathlib import Path
from typing import Any


class RunLog:
    """Appends to log.jsonl; a run that goes on from a checkpoint takes back what came after it.

    Args:
        step: of the checkpoint; entries after it go.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [entry for entry in read_log(path) if entry["step"] <= step] if step and path.is_file() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a log; a last line that was cut off by a crash is left out."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
