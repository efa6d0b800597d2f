"""A kit: a folder with all that drafts for one target, and how much each way of using it accepts.

table.npz          a retrieval table of `graft-jax fill`
NAME/config.json   draft heads of `graft-jax train`, each in a folder of its own
acceptance.json    what `graft-jax profile` measured; what `method="auto"` chooses from
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from graft_jax import methods
from graft_jax.io.hub import assets
from graft_jax.models.dflash_config import drafter_kind

FORMAT = 1
RECORD = "acceptance.json"
TABLE = "table.npz"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to draft.

    Attributes:
        method: a name from `methods.METHODS`.
        options: fields of `methods.Options`; "budget" is among them.
        acceptance: tokens a round, the bonus included, on texts that nothing was made from.
    """

    method: str
    options: dict[str, Any]
    acceptance: float

    @property
    def budget(self) -> int:
        return self.options["budget"]

    @property
    def name(self) -> str:
        rest = [f"{key}={value}" for key, value in sorted(self.options.items()) if key != "budget"]
        return ", ".join([f"{self.method}, {self.budget} nodes", *rest])


@dataclasses.dataclass(frozen=True)
class Record:
    """What `acceptance.json` says.

    Attributes:
        candidates: all that were measured.
        prompt: token ids to time rounds with.
        digest: of the file.
    """

    candidates: tuple[Candidate, ...]
    prompt: list[int]
    digest: str


def find(model: str, drafter: str | Path | None) -> Path | None:
    """The kit that `drafter` names, else the one that comes with a packaged model; None where there is none."""
    if drafter is None:
        return assets(model)
    folder = Path(drafter).expanduser()
    return folder if folder.is_dir() and not (folder / "config.json").is_file() else None


def heads(kit: Path) -> dict[str, Path]:
    """Folders of the draft heads by kind (see `io.block_drafter.KINDS`), the first by name of each."""
    found: dict[str, Path] = {}
    for file in sorted([*kit.glob("*/config.json"), *kit.glob("*/drafter/config.json")]):
        found.setdefault(drafter_kind(json.loads(file.read_bytes())), file.parent)
    return found


def head_for(kit: Path | None, kinds: Collection[str]) -> Path | None:
    """The folder of the first head that is of one of these kinds."""
    found = heads(kit) if kit is not None else {}
    return next((found[kind] for kind in kinds if kind in found), None)


def variants(kit: Path, budgets: Sequence[int]) -> list[tuple[str, dict[str, Any]]]:
    """Methods and options that a kit could be used with: every method whose head it has, with each budget."""
    kinds = heads(kit)
    found: list[tuple[str, dict[str, Any]]] = []
    for name, method in methods.METHODS.items():
        if name == "ar" or (method.heads and not set(method.heads) & set(kinds)):
            continue
        found += [(name, {"budget": budget}) for budget in budgets]
    return found


def digests(kit: Path) -> dict[str, str]:
    """SHA-256 of every file whose change would make a record untrue."""
    files = [
        *sorted(kit.glob(TABLE)),
        *(f for folder in heads(kit).values() for f in sorted(folder.glob("*.safetensors"))),
    ]
    return {str(file.relative_to(kit)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write_record(kit: Path, candidates: Sequence[Candidate], prompt: list[int], facts: dict[str, Any]) -> None:
    """Writes `acceptance.json`."""
    record = {
        "format": FORMAT, **facts, "files": digests(kit), "prompt": prompt,
        "candidates": [dataclasses.asdict(candidate) for candidate in candidates],
    }  # fmt: skip
    (kit / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read_record(kit: Path) -> Record:
    """Reads `acceptance.json`.

    Raises:
        ValueError: it is missing or broken, or was made with other heads or another table.
    """
    path = kit / RECORD
    if not path.is_file():
        raise ValueError(f"{path}: no such file; `graft-jax profile {kit}` measures what method 'auto' chooses from")
    data = path.read_bytes()
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise ValueError(f"{path}: is not of format {FORMAT}")
        candidates = tuple(Candidate(**entry) for entry in found["candidates"])
        for candidate in candidates:
            methods.get(candidate.method)
            assert methods.Options(**candidate.options).budget == candidate.budget
        prompt, files = [int(token) for token in found["prompt"]], dict(found["files"])
    except (KeyError, TypeError, AssertionError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path}: is no record that `graft-jax profile` wrote ({type(error).__name__}: {error})"
        ) from None
    now = digests(kit)
    changed = sorted(name for name in {*files, *now} if files.get(name) != now.get(name))
    if changed:
        raise ValueError(f"{path}: was measured before {', '.join(changed)} changed; run `graft-jax profile {kit}`")
    return Record(candidates, prompt, hashlib.sha256(data).hexdigest())
