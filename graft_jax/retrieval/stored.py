"""Successor tables filled from text beforehand, and their file."""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from graft_jax.retrieval.adjacency import EMPTY, Level, SuccessorTable
from pallas_kernels.retrieval_lookup import reference

VERSION = 1
_SETTINGS = ("num_tokens", "order", "width", "log2_rows")


@dataclasses.dataclass
class Observations:
    """What the target would say after each context of a text.

    Attributes:
        contexts: the last tokens up to a position, oldest first; EMPTY where there are fewer.
        successors: the target's best tokens there.
        weights: their probabilities.
    """

    contexts: np.ndarray  # [n, O] int32
    successors: np.ndarray  # [n, C] int32
    weights: np.ndarray  # [n, C] float32


def contexts_of(tokens: np.ndarray, segments: np.ndarray, order: int) -> np.ndarray:
    """[S, order] contexts of a packed row; none reaches into another text."""
    out = np.full((len(tokens), order), EMPTY, np.int32)
    for back in range(order):
        here, there = slice(back, None), slice(None, len(tokens) - back)
        same = (segments[here] == segments[there]) & (segments[here] > 0)
        out[here, order - 1 - back] = np.where(same, tokens[there], EMPTY)
    return out


def fill(table: SuccessorTable, seen: Observations) -> tuple[Level, ...]:
    """A table of what was seen: a context's successors with the largest summed probability.

    Of contexts that share a row the most frequent one stays; ties go to the lower ids.
    """
    levels = []
    for order in range(table.order, 0, -1):
        context = seen.contexts[:, -order:]
        empty = table.init_level(order)
        row, tag, known = reference.locate(jnp.asarray(context), order, empty.successors.shape[0])
        row, known = np.asarray(row), np.asarray(known)
        successors = np.array(empty.successors)
        tags = None if empty.tags is None else np.array(empty.tags)
        # Contexts in the order of their rows, the most frequent first within a row.
        whole = np.flatnonzero(known)
        unique, index, counts = np.unique(context[whole], axis=0, return_inverse=True, return_counts=True)
        first = np.zeros(len(unique), np.int64)
        index = index.reshape(-1)
        first[index[::-1]] = whole[::-1]
        ranked = np.lexsort((np.arange(len(unique)), -counts, row[first]))
        winners = ranked[np.unique(row[first][ranked], return_index=True)[1]]
        chosen = np.full(len(unique), -1)
        chosen[winners] = np.arange(len(winners))
        place = chosen[index]
        wanted = whole[place >= 0]
        successors[row[first[winners]]] = _best(
            np.repeat(place[place >= 0], seen.successors.shape[1]), seen.successors[wanted].ravel(),
            seen.weights[wanted].ravel(), len(winners), table.width,
        )  # fmt: skip
        if tags is not None:
            tags[row[first[winners]]] = np.asarray(tag)[first[winners]]
        levels.append(Level(successors, tags))  # type: ignore[arg-type]
    return tuple(levels)


def _best(place: np.ndarray, ids: np.ndarray, weights: np.ndarray, count: int, width: int) -> np.ndarray:
    """[count, width]: by place the ids with the largest summed weight, best first."""
    kept = ids != EMPTY
    pairs, index = np.unique(np.stack([place[kept], ids[kept]]), axis=1, return_inverse=True)
    total = np.bincount(index.ravel(), weights[kept].astype(np.float64), minlength=pairs.shape[1])
    order = np.lexsort((pairs[1], -total, pairs[0]))
    place, ids = pairs[0][order], pairs[1][order]
    rank = np.arange(len(place)) - np.searchsorted(place, place)
    out = np.full((count, width), EMPTY, np.int32)
    out[place[rank < width], rank[rank < width]] = ids[rank < width]
    return out


def save(path: str | Path, table: SuccessorTable, levels: tuple[Level, ...], facts: dict[str, Any]) -> None:
    """Writes a table, compressed: its rows that are not empty, ids in 16 bits where they fit."""
    small = table.num_tokens < 2**16 - 1
    arrays: dict[str, np.ndarray] = {}
    for order, level in zip(range(table.order, 0, -1), levels):
        successors = np.asarray(level.successors)
        rows = np.flatnonzero(successors[:, 0] != EMPTY)
        arrays[f"rows_{order}"] = np.diff(rows, prepend=0).astype(np.int32)  # gaps compress better
        held = successors[rows]
        arrays[f"successors_{order}"] = held.astype(np.uint16) if small else held  # EMPTY becomes 65535
        if level.tags is not None:
            arrays[f"tags_{order}"] = np.asarray(level.tags)[rows]
    settings = {"version": VERSION, **{name: getattr(table, name) for name in _SETTINGS}, **facts}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, allow_pickle=False, settings=np.frombuffer(json.dumps(settings).encode(), np.uint8), **arrays
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(buffer.getvalue())


def load(path: str | Path) -> tuple[SuccessorTable, tuple[Level, ...], dict[str, Any]]:
    """Reads what `save` wrote: settings, levels (NumPy), and the facts stored beside.

    Raises:
        ValueError: the file is missing or no table.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"table={str(path)!r}: no such file")
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("settings").tobytes())
        if facts.pop("version") != VERSION:
            raise ValueError(f"{path}: is not a table of version {VERSION}")
        table = SuccessorTable(**{name: facts.pop(name) for name in _SETTINGS})
        levels = []
        for order in range(table.order, 0, -1):
            rows, held = np.cumsum(arrays[f"rows_{order}"]), arrays[f"successors_{order}"].astype(np.int32)
            held[held == 2**16 - 1] = EMPTY
            count = table.num_tokens if order == 1 else 2**table.log2_rows
            successors = np.full((count, table.width), EMPTY, np.int32)
            successors[rows] = held
            tags = None
            if order > 1:
                tags = np.zeros(count, np.uint32)
                tags[rows] = arrays[f"tags_{order}"]
            levels.append(Level(successors, tags))  # type: ignore[arg-type]
    except (KeyError, TypeError, OSError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is no table that `graft-jax fill` wrote ({type(error).__name__}: {error})") from None
    return table, tuple(levels), facts
