"""Checkpoints of a training run, over orbax: written in the background, whole or not at all."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

KEEP = 3


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: is made if it does not exist.
        settings: of the run, JSON; a checkpoint of other settings is refused.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self.folder = Path(folder).expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._settings = json.loads(json.dumps(settings))
        latest: Any = ocp.training.preservation_policies.LatestN(KEEP)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.folder),
            preservation_policy=latest,
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        found = self._checkpointer.latest
        return None if found is None else int(found.step)

    def save(self, step: int, state: Any) -> None:
        """Begins to write a checkpoint; waits for the one before it.

        Raises:
            OSError: writing failed, e.g. the disk is full; older checkpoints are whole.
        """
        self.wait()
        # A copy: the next training step writes over the state while this is being written out.
        copy = _named(jax.tree.map(jnp.copy, state))
        self._checkpointer.save_async(step, copy, custom_metadata={"settings": self._settings}, force=True)

    def wait(self) -> None:
        """Until what was begun is written."""
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()

    def restore(self, like: Any) -> Any:
        """The newest state.

        Args:
            like: a state, or shapes and dtypes (and shardings) of one.

        Raises:
            ValueError: the checkpoint is of other settings or shapes; names what differs.
        """
        step = self.latest
        where = f"{self.folder}, step {step}"
        found = self._checkpointer.metadata(step)
        facts: Any = found.custom_metadata or {}
        self._check(facts.get("settings", {}), where)
        names, tree = jax.tree.flatten_with_path(like)
        wanted = {_name(path): leaf for path, leaf in names}
        stored = dict(found.metadata["state"] if "state" in found.metadata else found.metadata)
        for name, leaf in wanted.items():
            if name not in stored:
                raise ValueError(f"{where}: has no {name}")
            if tuple(stored[name].shape) != tuple(leaf.shape) or stored[name].dtype != leaf.dtype:
                raise ValueError(
                    f"{where}: {name} is {stored[name].dtype} {list(stored[name].shape)}; "
                    f"this run needs {np.dtype(leaf.dtype)} {list(leaf.shape)}"
                )
        extra = sorted(set(stored) - set(wanted))
        if extra:
            raise ValueError(f"{where}: has {', '.join(extra)}, which this run lacks")
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            for name, leaf in wanted.items()
        }
        loaded = self._checkpointer.load(step, abstract)
        return jax.tree.unflatten(tree, [loaded[name] for name in wanted])

    def _check(self, found: dict[str, Any], where: str) -> None:
        mine = self._settings
        differing = [name for name in {**mine, **found} if mine.get(name) != found.get(name)]
        if differing:
            said = "; ".join(f"{name}: {found.get(name)!r} there, {mine.get(name)!r} here" for name in differing)
            raise ValueError(f"{where}: was made with other settings ({said}); use another folder, or these settings")


def _named(state: Any) -> dict[str, Any]:
    """Leaves by name: what is stored does not depend on the classes that hold them."""
    return {_name(path): leaf for path, leaf in jax.tree.flatten_with_path(state)[0]}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
