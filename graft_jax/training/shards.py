"""Packed training rows on disk: fixed-size shards and a manifest, the same bytes for the same texts and seed."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft_jax.io.checkpoint import new_folder
from graft_jax.training.data import Document

FORMAT = 1
ROWS_A_SHARD = 64


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed texts.

    Attributes:
        tokens: ids, 0 where there is no text.
        segments: which text of its row a token belongs to, from 1; 0 where there is none.
        mask: what is trained on.
    """

    tokens: np.ndarray  # [N, S] int32
    segments: np.ndarray  # [N, S] int32
    mask: np.ndarray  # [N, S] bool

    def __len__(self) -> int:
        return len(self.tokens)


def pack(documents: Sequence[Document], length: int, seed: int) -> tuple[Rows, int]:
    """Packs texts into rows of `length`, the longest first, each into the fullest row that has room.

    Texts longer than a row lose their end. The rows come in an order drawn from `seed`.

    Returns:
        The rows, and how many tokens were cut off.
    """
    cut = sum(max(0, len(d.ids) - length) for d in documents)
    order = sorted(range(len(documents)), key=lambda i: (-min(length, len(documents[i].ids)), documents[i].digest))
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # rows with so much room left
    for i in order:
        size = min(length, len(documents[i].ids))
        room = min((r for r, held in by_room.items() if r >= size and held), default=None)
        if room is None:
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            row = by_room[room].pop()
        rows[row].append(i)
        by_room.setdefault(room - size, []).append(row)
    N = len(rows)
    tokens, segments, mask = (
        np.zeros((N, length), np.int32),
        np.zeros((N, length), np.int32),
        np.zeros((N, length), bool),
    )
    for out, row in enumerate(np.random.default_rng(seed).permutation(N)):
        at = 0
        for segment, i in enumerate(rows[row], 1):
            ids = documents[i].ids[:length]
            where = slice(at, at + len(ids))
            tokens[out, where], segments[out, where], mask[out, where] = ids, segment, documents[i].mask[:length]
            at += len(ids)
    return Rows(tokens, segments, mask), cut


def write(folder: str | Path, splits: dict[str, Rows], facts: dict[str, Any]) -> dict[str, Any]:
    """Writes shards and manifest.json; a broken run leaves nothing.

    Args:
        facts: what made the rows; goes into the manifest.

    Returns:
        The manifest.

    Raises:
        ValueError: the folder is in the way.
    """
    with new_folder(folder) as temporary:
        manifest = {"format": FORMAT, **facts, "splits": {}}
        for name, rows in splits.items():
            shards = []
            for start in range(0, len(rows), ROWS_A_SHARD):
                stop = min(start + ROWS_A_SHARD, len(rows))
                file = f"{name}-{start // ROWS_A_SHARD:05d}.npz"
                arrays = {f.name: getattr(rows, f.name)[start:stop] for f in dataclasses.fields(Rows)}
                with open(temporary / file, "wb") as out:
                    np.savez_compressed(out, allow_pickle=False, **arrays)
                # Of the contents: compressed bytes differ between versions of zlib.
                content = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values()))
                shards.append({"file": file, "rows": stop - start, "sha256": content.hexdigest()})
            manifest["splits"][name] = {
                "rows": len(rows),
                "texts": int(rows.segments.max(axis=1).sum()) if len(rows) else 0,
                "tokens": int((rows.segments > 0).sum()),
                "trained_tokens": int(rows.mask.sum()),
                "shards": shards,
            }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder that `graft-jax prepare` wrote.

    Raises:
        ValueError: there is none, or it is of another format.
    """
    path = Path(folder) / "manifest.json"
    if not path.is_file():
        raise ValueError(f"data={str(folder)!r}: has no manifest.json; make it with `graft-jax prepare`")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: format {FORMAT} is needed; make the data again with `graft-jax prepare`")
    return manifest


def read(folder: str | Path, split: str) -> Rows:
    """Reads a split and checks it against the manifest.

    Raises:
        ValueError: a shard is missing or not what the manifest says.
    """
    manifest = read_manifest(folder)
    parts = []
    for shard in manifest["splits"][split]["shards"]:
        path = Path(folder) / shard["file"]
        if not path.is_file():
            raise ValueError(f"{path}: is missing")
        with np.load(path) as file:
            arrays = {f.name: file[f.name] for f in dataclasses.fields(Rows)}
        content = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values()))
        if content.hexdigest() != shard["sha256"]:
            raise ValueError(f"{path}: differs from what manifest.json says")
        parts.append(arrays)
    if not parts:
        length = manifest["length"]
        return Rows(np.zeros((0, length), np.int32), np.zeros((0, length), np.int32), np.zeros((0, length), bool))
    return Rows(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
