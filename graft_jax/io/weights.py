"""The name table of target weights, and conversion both ways with a ledger.

Every tensor of a checkpoint is used once and every parameter is filled once, with equal shapes; anything
left over or missing is an error that lists the names.
"""

import concurrent.futures
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.io.tensors import BFLOAT16, SourceTensor, aligned_empty, is_finite, to_bfloat16, to_float32
from graft_jax.models.layers import is_transposed
from graft_jax.models.transformer import LayerParams, TargetParams, abstract_params

# Our field, its name in Hugging Face files and in GGUF files, its stored shape (rows first) in letters:
# M width, F feed-forward width, V vocabulary, Q and K all query and key/value heads, E head width.
# All families share the table; a row counts where `abstract_params` has that field.
_LAYER_TABLE = (
    ("attn_norm", "input_layernorm.weight", "attn_norm.weight", "M"),
    ("q", "self_attn.q_proj.weight", "attn_q.weight", "QM"),
    ("k", "self_attn.k_proj.weight", "attn_k.weight", "KM"),
    ("v", "self_attn.v_proj.weight", "attn_v.weight", "KM"),
    ("o", "self_attn.o_proj.weight", "attn_output.weight", "MQ"),
    ("q_bias", "self_attn.q_proj.bias", "attn_q.bias", "Q"),
    ("k_bias", "self_attn.k_proj.bias", "attn_k.bias", "K"),
    ("v_bias", "self_attn.v_proj.bias", "attn_v.bias", "K"),
    ("o_bias", "self_attn.o_proj.bias", "attn_output.bias", "M"),
    ("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", "E"),
    ("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", "E"),
    ("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "M"),
    ("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "FM"),
    ("up", "mlp.up_proj.weight", "ffn_up.weight", "FM"),
    ("down", "mlp.down_proj.weight", "ffn_down.weight", "MF"),
    ("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", "F"),
    ("up_bias", "mlp.up_proj.bias", "ffn_up.bias", "F"),
    ("down_bias", "mlp.down_proj.bias", "ffn_down.bias", "M"),
)
_MODEL_TABLE = (
    ("embed", "model.embed_tokens.weight", "token_embd.weight", "VM"),
    ("norm", "model.norm.weight", "output_norm.weight", "M"),
    ("head", "lm_head.weight", "output.weight", "VM"),
)
# Tensors that only repeat what the configuration says.
_IMPLIED = {"hf": (".rotary_emb.inv_freq",), "gguf": ("rope_freqs.weight",)}

# Numbers converted at a time: they and their intermediate results stay in a core's cache.
_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Slot:
    """A parameter and where a checkpoint keeps it.

    Attributes:
        path: keys into `TargetParams`: ("embed",) or ("layers", 3, "q").
        source: the tensor's name in the checkpoint.
        shape: stored shape, rows first.
        linear: stored (out, in), as ours is unless the dtype wants (in, out).
        heads: above 0 where GGUF keeps the rows of that many rotary heads in another order.
    """

    path: tuple[str | int, ...]
    source: str
    shape: tuple[int, ...]
    linear: bool = False
    heads: int = 0


def slots(config: ModelConfig, scheme: str) -> list[Slot]:
    """All parameters of a model, with names by `scheme`: "hf" or "gguf"."""
    E, column = config.head_dim, {"hf": 1, "gguf": 2}[scheme]
    sizes = {"M": config.hidden_size, "F": config.intermediate_size, "V": config.vocab_size, "E": E,
             "Q": config.num_heads * E, "K": config.num_kv_heads * E}  # fmt: skip
    # ggml turns neighbouring pairs, so llama files interleave the halves of each query and key head.
    turned = {"Q": config.num_heads, "K": config.num_kv_heads} if scheme == "gguf" else {}
    turned = turned if config.model_type == "llama" else {}

    def slot(path: tuple[str | int, ...], name: str, letters: str) -> Slot:
        field, shape = path[-1], tuple(sizes[letter] for letter in letters)
        heads = turned.get(letters[0], 0) if field in ("q", "k", "q_bias", "k_bias") else 0
        return Slot(path, name, shape, len(shape) == 2 and field != "embed", heads)

    abstract = abstract_params(config, jnp.float32)
    layer_prefix = {"hf": "model.layers", "gguf": "blk"}[scheme]
    rows = [slot((row[0],), row[column], row[3]) for row in _MODEL_TABLE if getattr(abstract, row[0]) is not None]
    for i, layer in enumerate(abstract.layers):
        rows += [
            slot(("layers", i, row[0]), f"{layer_prefix}.{i}.{row[column]}", row[3])
            for row in _LAYER_TABLE
            if getattr(layer, row[0]) is not None
        ]
    return rows


def settle_head(config: ModelConfig, tensors: Mapping[str, SourceTensor]) -> tuple[ModelConfig, set[str]]:
    """Decides what a stored head of a tied Hugging Face checkpoint means.

    An equal head is redundant and dropped. A different one is used, with a warning, and the model counts
    as untied: transformers 5 decides alike.

    Returns:
        The configuration to go on with, and the tensors that are accounted for.
    """
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not config.tie_embeddings or head is None or embedding is None:
        return config, set()
    if head.shape == embedding.shape and all(
        np.array_equal(head.rows(*block), embedding.rows(*block)) for block in _blocks(head.shape)
    ):
        return config, {"lm_head.weight"}
    warnings.warn(
        f"{head.where}: config.json says tie_word_embeddings, but lm_head.weight differs from the embedding; "
        "the stored head is used",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_embeddings=False), set()


def match(
    config: ModelConfig,
    tensors: Mapping[str, SourceTensor],
    scheme: str,
    where: str,
    used: frozenset[str] = frozenset(),
) -> list[tuple[Slot, SourceTensor]]:
    """The ledger: each slot with its tensor.

    Args:
        used: tensors that are accounted for already.

    Raises:
        ValueError: tensors are missing or left over, or a shape differs.
    """
    if config.num_layers > len(tensors):  # before a list of all slots could grow without bound
        raise ValueError(f"{where}: {len(tensors)} tensors are too few for {config.num_layers} layers")
    heads = f"{config.num_heads} heads, {config.num_kv_heads} key/value heads, head_dim {config.head_dim}"
    return pair(slots(config, scheme), tensors, where, f"a {config.model_type} model", heads, used, _IMPLIED[scheme])


def pair(
    wanted: list[Slot],
    tensors: Mapping[str, SourceTensor],
    where: str,
    what: str,
    sizes: str,
    used: frozenset[str] = frozenset(),
    implied: tuple[str, ...] = (),
) -> list[tuple[Slot, SourceTensor]]:
    """Each slot with its tensor; errors as for `match`.

    Args:
        what: what the slots make up, for messages.
        sizes: the configuration's sizes that decide the shapes, for messages.
        implied: endings of names that may be left over.
    """
    missing = [slot.source for slot in wanted if slot.source not in tensors]
    if missing:
        hint = "; it is needed unless tie_word_embeddings is true" if missing == ["lm_head.weight"] else ""
        raise ValueError(f"{where}: tensors are missing: {_listed(missing)}{hint}")
    pairs = [(slot, tensors[slot.source]) for slot in wanted]
    for slot, tensor in pairs:
        if tensor.shape != slot.shape:
            raise ValueError(
                f"{tensor.where}: tensor {slot.source} has shape {list(tensor.shape)}, but the configuration "
                f"needs {list(slot.shape)} ({sizes})"
            )
    known = used.union(slot.source for slot in wanted)
    extra = [name for name in tensors if name not in known and not (implied and name.endswith(implied))]
    if extra:
        raise ValueError(f"{where}: tensors that {what} has no place for: {_listed(extra)}")
    return pairs


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def load(
    config: ModelConfig,
    pairs: list[tuple[Slot, SourceTensor]],
    dtype: np.dtype,
    sharding: Any = None,
) -> TargetParams:
    """Converts and places the tensors, each once.

    Args:
        pairs: from `match`.
        dtype: float32 or bfloat16.
        sharding: None, one `jax.sharding.Sharding`, or a `TargetParams` of them.

    Raises:
        ValueError: a tensor holds NaN or infinity, or its file ends early.
    """

    def place(pair: tuple[Slot, SourceTensor]) -> tuple[Slot, jax.Array]:
        slot, tensor = pair
        where = _get(sharding, slot.path) if isinstance(sharding, TargetParams) else sharding
        return slot, jax.device_put(convert(slot, tensor, dtype), where, may_alias=True)

    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        arrays = {slot.path: array for slot, array in pool.map(place, pairs)}
    return assemble(config, arrays)


def assemble(config: ModelConfig, arrays: Mapping[tuple[str | int, ...], jax.Array]) -> TargetParams:
    """Parameters from arrays by path."""
    top: dict[str, Any] = {str(path[0]): array for path, array in arrays.items() if len(path) == 1}
    layers: dict[int, dict[str, Any]] = {i: {} for i in range(config.num_layers)}
    for path, array in arrays.items():
        if len(path) == 3:
            layers[int(path[1])][str(path[2])] = array
    return TargetParams(layers=tuple(LayerParams(**layer) for layer in layers.values()), **top)


def convert(slot: Slot, tensor: SourceTensor, dtype: np.dtype) -> np.ndarray:
    """One parameter in our layout, block by block: nothing but the result is ever held whole."""
    transposed = slot.linear and is_transposed(dtype)
    out = aligned_empty(slot.shape[::-1] if transposed else slot.shape, dtype)
    rows_of = out.T if transposed else out
    for start, stop in _blocks(slot.shape, column_strips=transposed):
        with np.errstate(all="ignore"):  # decoding NaN or infinity must not warn: it is refused below
            block = tensor.rows(start, stop)
        if not is_finite(block):
            raise ValueError(f"{tensor.where}: tensor {tensor.name} holds NaN or infinity")
        block = to_bfloat16(block) if dtype == BFLOAT16 else to_float32(block)
        rows = slice(start, stop) if not slot.heads else _unpermuted(start, stop, slot)
        rows_of[rows] = block
    return out


def _unpermuted(start: int, stop: int, slot: Slot) -> np.ndarray:
    """Our rows of the stored rows: stored as (head, pair, half), ours are (head, half, pair)."""
    order = np.arange(slot.shape[0]).reshape(slot.heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return order[start:stop]


def _blocks(shape: tuple[int, ...], column_strips: bool = False) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK // math.prod(shape[1:]))
    if column_strips:  # wide strips of columns are written a fifth faster than narrow ones
        step = max(128, step)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _get(params: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        params = params[key] if isinstance(key, int) else getattr(params, key)
    return params


def stored(config: ModelConfig, params: TargetParams) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """What a Hugging Face checkpoint of these parameters holds: shapes by name, and a reader by name."""
    by_name = {slot.source: slot for slot in slots(config, "hf")}

    def tensor(name: str) -> np.ndarray:
        slot = by_name[name]
        array = np.asarray(_get(params, slot.path))
        return array.T if slot.linear and is_transposed(array.dtype) else array

    return {slot.source: slot.shape for slot in by_name.values()}, tensor
