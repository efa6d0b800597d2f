"""Loading and saving block drafters in z-lab's format (58 tensors for five layers) and Domino's (62)."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from graft_jax.config import ModelConfig
from graft_jax.io import weights
from graft_jax.io.checkpoint import check_dtype
from graft_jax.io.drafter import Source, as_stored, convert_all, load_eagle3, open_folder, write_folder
from graft_jax.io.weights import Slot
from graft_jax.models.dflash import DFlashParams, DominoParams
from graft_jax.models.dflash_config import DFlashConfig, drafter_kind
from graft_jax.models.layers import is_transposed
from graft_jax.models.transformer import LayerParams

_OLD_PREFIX = "logit_head."  # of the head's tensors in the first Domino checkpoints
KINDS = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash drafter", "domino": "a Domino drafter"}
_DOWN = "embed_proj.0.weight"  # W1 of [hidden, state]: one tensor, two parameters


def load_drafter(
    drafter: str | Path,
    target: ModelConfig,
    *,
    dtype: Any,
    kinds: Collection[str],
    rope: str | int | float = "auto",
    target_embed: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Loads a draft head of whatever kind its `config.json` says.

    Args:
        drafter: a Hugging Face folder (safetensors or .bin) or a hub id.
        target: the model that it drafts for.
        dtype: of the weights: "float32" or "bfloat16".
        kinds: what is wanted, of "eagle3", "dflash" and "domino".
        rope: of an EAGLE-3 head, see `Eagle3Config.from_hf`; block drafters' rope is always their config's.
        target_embed: see `load_eagle3`.

    Raises:
        ValueError: the head is of another kind, broken, unsupported, or made for another target.
    """
    source = open_folder(drafter)
    kind = drafter_kind(source.config)
    if kind not in kinds:
        raise ValueError(f"drafter={str(drafter)!r} is {KINDS[kind]}; wanted: {' or '.join(KINDS[k] for k in kinds)}")
    if kind == "eagle3":
        return load_eagle3(source, target, dtype=dtype, rope=rope, target_embed=target_embed)
    if rope != "auto":
        raise ValueError(f"draft_rope={rope!r} goes with EAGLE-3 heads; {str(drafter)!r} is {KINDS[kind]}")
    return load_block_drafter(source, target, dtype=dtype)


def load_block_drafter(
    drafter: str | Path | Source, target: ModelConfig, *, dtype: Any
) -> tuple[DFlashConfig, DFlashParams]:  # fmt: skip
    """Loads a DFlash or Domino drafter.

    Args:
        drafter: a Hugging Face folder (safetensors or .bin), a hub id, or what `open_folder` made of it.
        target: the model that it drafts for.
        dtype: of the weights: "float32" or "bfloat16".

    Raises:
        ValueError: the drafter is broken, unsupported, or made for another target.
    """
    source, dtype = open_folder(drafter), check_dtype(dtype)
    config = DFlashConfig.from_hf(source.config, target, where=source.where)
    tensors = {name.removeprefix(_OLD_PREFIX): tensor for name, tensor in source.tensors.items()}
    sizes = f"hidden_size {config.model.hidden_size}, {config.model.num_layers} layers, {len(config.taps)} features"
    what = KINDS[config.kind]
    pairs = weights.pair(block_slots(config), tensors, str(source.folder), what, sizes)
    return config, _assemble(config, convert_all(pairs, dtype))


def save_block_drafter(folder: str | Path, config: DFlashConfig, params: DFlashParams) -> None:
    """Writes a drafter as a Hugging Face folder, in the parameters' dtype.

    Raises:
        ValueError: the folder is in the way.
    """
    arrays = _flatten(params)
    tensors = {slot.source: as_stored(slot, arrays[slot.path]) for slot in block_slots(config)}
    write_folder(folder, config.to_hf() | {"dtype": np.dtype(params.fc.dtype).name}, tensors)


def block_slots(config: DFlashConfig) -> list[Slot]:
    """All tensors of a drafter."""
    M, V = config.model.hidden_size, config.model.vocab_size
    slots = [
        Slot(("fc",), "fc.weight", (M, len(config.taps) * M), linear=True),
        Slot(("hidden_norm",), "hidden_norm.weight", (M,)),
        Slot(("norm",), "norm.weight", (M,)),
    ]
    for slot in weights.slots(config.model, "hf"):
        if slot.path[0] == "layers":
            slots.append(Slot(slot.path, slot.source.removeprefix("model."), slot.shape, slot.linear))
    if config.domino is not None:
        G, R = config.domino.gru_size, config.domino.rank
        slots += [
            Slot(("domino", "gru_input"), "prefix_gru.weight_ih_l0", (3 * G, M), linear=True),
            Slot(("domino", "gru_state"), "prefix_gru.weight_hh_l0", (3 * G, G), linear=True),
            Slot(("domino", "down"), _DOWN, (R, M + G), linear=True),
            Slot(("domino", "up"), "embed_proj.2.weight", (V, R)),
        ]
    return slots


def _assemble(config: DFlashConfig, arrays: Mapping[tuple[str | int, ...], np.ndarray]) -> DFlashParams:
    layers: list[dict[str, Any]] = [{} for _ in range(config.model.num_layers)]
    top: dict[str, Any] = {}
    head: dict[str, Any] = {}
    for path, array in arrays.items():
        if path[0] == "layers":
            layers[int(path[1])][str(path[2])] = jnp.asarray(array)
        elif path[-1] == "down":
            M, axis = config.model.hidden_size, 0 if is_transposed(array.dtype) else 1
            hidden, state = np.split(array, [M], axis=axis)
            head |= {"hidden_down": jnp.asarray(hidden), "state_down": jnp.asarray(state)}
        else:
            (top if len(path) == 1 else head)[str(path[-1])] = jnp.asarray(array)
    domino = DominoParams(**head) if head else None
    return DFlashParams(layers=tuple(LayerParams(**layer) for layer in layers), domino=domino, **top)


def _flatten(params: DFlashParams) -> dict[tuple[str | int, ...], np.ndarray]:
    """The parameters by the paths of `block_slots`."""
    out: dict[tuple[str | int, ...], np.ndarray] = {}
    for keys, leaf in jax.tree.leaves_with_path(params):
        path: list[Any] = [key.idx if isinstance(key, SequenceKey) else key.name for key in keys]
        out[tuple(path)] = np.asarray(leaf)
    if params.domino is not None:
        parts = out.pop(("domino", "hidden_down")), out.pop(("domino", "state_down"))
        out["domino", "down"] = np.concatenate(parts, axis=0 if is_transposed(parts[0].dtype) else 1)
    return out
