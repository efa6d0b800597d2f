"""Files that later processes of the same user may use again."""

import os
import tempfile
from pathlib import Path


def folder() -> Path:
    """The user's cache folder of this package; need not exist."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "graft_jax"


def replace(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all. Where the user's cache cannot be written, nothing is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return
