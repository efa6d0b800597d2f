"""Opening, loading and saving draft heads in the formats that public engines read."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from graft_jax.config import ModelConfig
from graft_jax.io import weights
from graft_jax.io.checkpoint import check_dtype, folder_tensors, new_folder
from graft_jax.io.hub import resolve
from graft_jax.io.safetensors import parse_json
from graft_jax.io.tensors import ALL_DTYPES, PLAIN_DTYPES, SourceTensor
from graft_jax.io.weights import Slot
from graft_jax.models.eagle3 import Eagle3Params
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import is_transposed

# Our field and the tensor's name; {layer} is `midlayer` or `layers.0`.
_EAGLE3_LINEAR = {
    "fc": "fc.weight", "q": "{layer}.self_attn.q_proj.weight", "k": "{layer}.self_attn.k_proj.weight",
    "v": "{layer}.self_attn.v_proj.weight", "o": "{layer}.self_attn.o_proj.weight",
    "gate": "{layer}.mlp.gate_proj.weight", "up": "{layer}.mlp.up_proj.weight",
    "down": "{layer}.mlp.down_proj.weight", "head": "lm_head.weight",
}  # fmt: skip
_EAGLE3_VECTORS = {
    "embed_norm": "{layer}.input_layernorm.weight", "hidden_norm": "{layer}.hidden_norm.weight",
    "mlp_norm": "{layer}.post_attention_layernorm.weight", "norm": "norm.weight",
}  # fmt: skip
_MAPS = ("d2t", "t2d")
_LAYER_NAMES = {"eagle": "midlayer", "speculators": "layers.0"}
# Copies of target weights that some exports carry.
_COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Source:
    """A drafter's folder, opened.

    Attributes:
        folder: where it lies.
        config: its `config.json`.
        tensors: by name; numbers are read later.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]

    @property
    def where(self) -> str:
        return str(self.folder / "config.json")


def open_folder(drafter: str | Path | Source) -> Source:
    """Opens a folder or a hub id; what is open already comes back as it is.

    Raises:
        ValueError: there is none, or it has no config.json or no weights.
    """
    if isinstance(drafter, Source):
        return drafter
    folder = resolve(drafter)
    if not (folder / "config.json").is_file():
        raise ValueError(f"drafter={str(drafter)!r}: has no config.json")
    text = (folder / "config.json").read_bytes()
    return Source(folder, parse_json(text, str(folder / "config.json")), folder_tensors(folder, ALL_DTYPES))


def load_eagle3(
    drafter: str | Path | Source,
    target: ModelConfig,
    *,
    dtype: Any,
    rope: str | int | float = "auto",
    target_embed: jax.Array | None = None,
) -> tuple[Eagle3Config, Eagle3Params]:
    """Loads an EAGLE-3 head.

    Args:
        drafter: a Hugging Face folder (safetensors or .bin), a hub id, or what `open_folder` made of it.
        target: the model that it drafts for.
        dtype: of the weights: "float32" or "bfloat16".
        rope: see `Eagle3Config.from_hf`.
        target_embed: the target's embedding; a stored copy of it is not loaded twice.

    Raises:
        ValueError: the head is broken, unsupported, or made for another target.
    """
    source, dtype = open_folder(drafter), check_dtype(dtype)
    tensors = source.tensors
    config = Eagle3Config.from_hf(
        source.config, target, shapes={name: t.shape for name, t in tensors.items()}, rope=rope, where=source.where
    )
    layer = "layers.0" if any(name.startswith("layers.0.") for name in tensors) else "midlayer"
    wanted = eagle3_slots(config, layer)
    own_embed = _needs_own_embed(config, tensors, target_embed, source.where)
    if own_embed:
        wanted.append(Slot(("embed",), "embed_tokens.weight", (config.vocab_size, config.hidden_size)))
    sizes = f"hidden_size {config.hidden_size}, {len(config.taps)} features of width {config.target_hidden_size}, "
    sizes += f"{config.num_heads} heads, draft_vocab_size {config.draft_vocab_size}"
    known = frozenset((*_MAPS, *_COPIES, "embed_tokens.weight"))
    pairs = weights.pair(wanted, tensors, str(source.folder), "an EAGLE-3 head", sizes, known)
    arrays = {path: jnp.asarray(array) for path, array in convert_all(pairs, dtype).items()}
    fields: dict[str, Any] = {str(path[0]): array for path, array in arrays.items() if len(path) == 1}
    norms = tuple(arrays["fc_norms", i] for i in range(len(config.taps))) if config.fc_norm else ()
    mapped = _draft_to_target(config, tensors, str(source.folder))
    return config, Eagle3Params(**fields, fc_norms=norms, draft_to_target=mapped)


def eagle3_slots(config: Eagle3Config, layer: str) -> list[Slot]:
    """The tensors of a head, without the embedding and the vocabulary maps."""
    M, F, E, V = config.hidden_size, config.intermediate_size, config.head_dim, config.draft_vocab_size
    Q, K, wide = config.num_heads * E, config.num_kv_heads * E, len(config.taps) * config.target_hidden_size
    shapes = {"fc": (M, wide), "q": (Q, 2 * M), "k": (K, 2 * M), "v": (K, 2 * M), "o": (M, Q),
              "gate": (F, M), "up": (F, M), "down": (M, F), "head": (V, M)}  # fmt: skip
    slots = [Slot((f,), name.format(layer=layer), shapes[f], linear=True) for f, name in _EAGLE3_LINEAR.items()]
    slots += [Slot((f,), name.format(layer=layer), (M,)) for f, name in _EAGLE3_VECTORS.items()]
    if config.qk_norm:
        slots += [Slot((f"{x}_norm",), f"{layer}.self_attn.{x}_norm.weight", (E,)) for x in "qk"]
    if config.norm_before_fc:
        slots.append(Slot(("input_norm",), "input_norm.weight", (wide,)))
    if config.fc_norm:
        slots += [
            Slot(("fc_norms", i), f"fc_norm.{i}.weight", (config.target_hidden_size,)) for i in range(len(config.taps))
        ]
    return slots


def _needs_own_embed(config: Eagle3Config, tensors, target_embed, where: str) -> bool:
    stored = tensors.get("embed_tokens.weight")
    if config.hidden_size != config.target_hidden_size and stored is None:
        raise ValueError(
            f"{where}: the head is {config.hidden_size} wide and the target {config.target_hidden_size}, "
            "so it needs embed_tokens.weight of its own"
        )
    if stored is None:
        return False
    if target_embed is None or stored.shape != target_embed.shape:
        return True
    ours = np.asarray(target_embed)
    return not all(
        np.array_equal(stored.rows(i, i + 1024).astype(ours.dtype), ours[i : i + 1024])
        for i in range(0, ours.shape[0], 1024)
    )


def _draft_to_target(config: Eagle3Config, tensors: Mapping[str, SourceTensor], where: str) -> jax.Array | None:
    """Target ids of the draft vocabulary. Files hold offsets: target id = draft id + d2t[draft id]."""
    V = config.draft_vocab_size
    if V == config.vocab_size:
        return None  # as in the reference: both vocabularies are one, whatever the maps say
    if "d2t" not in tensors:
        raise ValueError(f"{where}: tensor d2t is missing; draft_vocab_size={V} of {config.vocab_size} needs it")
    offsets = tensors["d2t"]
    if offsets.shape != (V,) or offsets.kind not in ("I64", "I32"):
        raise ValueError(f"{where}: d2t is {offsets.kind} {list(offsets.shape)}; {V} whole numbers are needed")
    ids = np.arange(V) + offsets.rows(0, V).astype(np.int64)
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(np.unique(ids)) != V:
        raise ValueError(
            f"{where}: d2t must give {V} different target ids below {config.vocab_size}; it gives "
            f"{ids.min()} to {ids.max()}, {len(np.unique(ids))} different (d2t holds offsets, not ids)"
        )
    if "t2d" in tensors:
        kept = tensors["t2d"].rows(0, tensors["t2d"].shape[0]).astype(bool)
        expected = np.zeros(config.vocab_size, bool)
        expected[ids] = True
        if kept.shape != expected.shape or (kept != expected).any():
            raise ValueError(f"{where}: t2d does not mark the target ids that d2t gives")
    return jnp.asarray(ids, jnp.int32)


def save_eagle3(folder: str | Path, config: Eagle3Config, params: Eagle3Params) -> None:
    """Writes a head as a Hugging Face folder in its own layout, in the parameters' dtype.

    Raises:
        ValueError: the folder is in the way.
    """
    dtype = np.dtype(params.fc.dtype)
    tensors: dict[str, np.ndarray] = {}
    for slot in eagle3_slots(config, _LAYER_NAMES[config.layout]):
        field = getattr(params, str(slot.path[0]))
        tensors[slot.source] = as_stored(slot, np.asarray(field[slot.path[1]] if len(slot.path) == 2 else field))
    if params.embed is not None:
        tensors["embed_tokens.weight"] = np.asarray(params.embed)
    ids = np.arange(config.vocab_size) if params.draft_to_target is None else np.asarray(params.draft_to_target)
    tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
    tensors["t2d"] = np.zeros(config.vocab_size, bool)
    tensors["t2d"][ids] = True
    write_folder(folder, config.to_hf() | {"dtype": dtype.name}, tensors)


def convert_all(pairs: list[tuple[Slot, SourceTensor]], dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
    """Parameters by path, of tensors that must hold numbers."""
    for _, tensor in pairs:
        if tensor.kind not in PLAIN_DTYPES:
            raise ValueError(f"{tensor.where}: tensor {tensor.name} has dtype {tensor.kind}; numbers are needed")
    return {slot.path: weights.convert(slot, tensor, dtype) for slot, tensor in pairs}


def as_stored(slot: Slot, array: np.ndarray) -> np.ndarray:
    """A parameter as its file keeps it: rows first."""
    return np.ascontiguousarray(array.T if slot.linear and is_transposed(array.dtype) else array)


def write_folder(folder: str | Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes a drafter's folder whole, or not at all."""
    with new_folder(folder) as temporary:
        safetensors.numpy.save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)  # the writer keeps it to its owner
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
