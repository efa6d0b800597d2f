"""The target's features of packed rows: made in the step, or kept on disk after they were made once."""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.io.tensors import BFLOAT16
from graft_jax.models.transformer import TargetParams
from graft_jax.training import features, shards
from graft_jax.training.features import Features

ROWS_A_FILE = 64


def facts(config: ModelConfig, params: TargetParams, manifest: dict[str, Any]) -> dict[str, Any]:
    """What tells targets and data sets apart: a hash of the configuration and every weight, and those of the shards."""
    found = hashlib.sha256(repr(config).encode())
    for leaf in jax.tree.leaves(params):
        found.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    data = "".join(shard["sha256"] for shard in manifest["splits"]["train"]["shards"])
    return {"target": found.hexdigest(), "data": hashlib.sha256(data.encode()).hexdigest()}


class FeatureSource:
    """Batches of features of the rows of a data set.

    Features are rounded to bfloat16 wherever they come from, so that training does not depend on it.

    Args:
        taps: the drafter's.
        rows: the data set.
        folder: where to keep features; None makes them anew each time. Files fill as batches are asked for.
        facts: what the features depend on beside the rows' place: the target and the data. A folder made
            with others is refused.

    Raises:
        ValueError: the folder was made by something else; says by what.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: TargetParams,
        taps: tuple[int, ...],
        rows: shards.Rows,
        folder: str | Path | None,
        facts: dict[str, Any],
    ):
        self.rows, self.folder = rows, None if folder is None else Path(folder)
        self._params, self._arrays = params, len(taps) + 1
        self._width = config.hidden_size
        self._files: dict[int, tuple[np.memmap, np.memmap]] = {}
        self._extract = jax.jit(functools.partial(_extract, config, taps=taps))
        if self.folder is not None:
            shape = {"rows": len(rows), "length": rows.tokens.shape[1], "width": config.hidden_size}
            _claim(self.folder, {**facts, "taps": list(taps), **shape, "dtype": str(params.dtype)})

    def batch(self, indices: Sequence[int]) -> Features:
        """Features of some rows."""
        index = np.asarray(indices)
        tokens, mask, segments = (jnp.asarray(x[index]) for x in (self.rows.tokens, self.rows.mask, self.rows.segments))
        if self.folder is None:
            return self._extract(self._params, tokens=tokens, mask=mask, segments=segments)
        if not all(self._done(i) for i in index):
            made = self._extract(self._params, tokens=tokens, mask=mask, segments=segments)
            for place, i in enumerate(index):
                self._put(
                    int(i), [np.asarray(x[place]) for x in (*made.taps, made.hidden)], np.asarray(made.best[place])
                )
        streams, best = zip(*(self._get(int(i)) for i in index))
        *taps, hidden = (jnp.asarray(np.stack(x)) for x in zip(*streams))
        return Features(tokens, tuple(taps), hidden, jnp.asarray(np.stack(best)), mask, segments)

    # A file holds the streams of ROWS_A_FILE rows; another their choices plus one, 0 where a row is not made
    # yet. Choices are written last, so a row that has them is whole.

    def _open(self, i: int) -> tuple[np.memmap, np.memmap]:
        file = i // ROWS_A_FILE
        if file not in self._files:
            assert self.folder is not None
            count = min(ROWS_A_FILE, len(self.rows) - file * ROWS_A_FILE)
            S = self.rows.tokens.shape[1]
            shapes = {"streams": ((count, self._arrays, S, self._width), np.uint16), "best": ((count, S), np.int32)}
            opened = []
            for name, (shape, dtype) in shapes.items():
                path = self.folder / f"{name}-{file:05d}.bin"
                mode = "r+" if path.exists() and path.stat().st_size else "w+"
                opened.append(np.memmap(path, dtype, mode, shape=shape))
            self._files[file] = (opened[0], opened[1])
        return self._files[file]

    def _done(self, i: int) -> bool:
        return bool(self._open(i)[1][i % ROWS_A_FILE].all())

    def _put(self, i: int, streams: list[np.ndarray], best: np.ndarray) -> None:
        stored, choices = self._open(i)
        stored[i % ROWS_A_FILE] = np.stack(streams).view(np.uint16)
        choices[i % ROWS_A_FILE] = best + 1

    def _get(self, i: int) -> tuple[list[np.ndarray], np.ndarray]:
        stored, choices = self._open(i)
        return list(stored[i % ROWS_A_FILE].view(BFLOAT16)), choices[i % ROWS_A_FILE] - 1


def _extract(config, params, taps, tokens, mask, segments) -> Features:
    made = features.extract(config, params, taps, tokens, mask, segments)
    halves = tuple(x.astype(jnp.bfloat16) for x in made.taps)
    return made.replace(taps=halves, hidden=made.hidden.astype(jnp.bfloat16))


def _claim(folder: Path, facts: dict[str, Any]) -> None:
    """Marks a new folder, or checks the mark of an old one."""
    path = folder / "features.json"
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"features={str(folder)!r}: holds something else")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, indent=2) + "\n")
        return
    found = json.loads(path.read_text())
    differing = [name for name in facts if found.get(name) != facts[name]]
    if differing:
        said = "; ".join(f"{name}: {found.get(name)!r} there, {facts[name]!r} here" for name in differing)
        raise ValueError(f"features={str(folder)!r}: was made by another run ({said})")
