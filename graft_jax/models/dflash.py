"""The DFlash backbone as pure functions of its parameters (z-lab's `dflash.model`).

A block is [anchor, MASK, ...] at consecutive positions. Every layer lets its slots see the keys and values
made of the target's features at all positions before the anchor, and one another. Those of the features are
made once and kept (`context`); those of the block are dropped with it.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.models import rope, transformer
from graft_jax.models.cache import Block, KVCache
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.models.layers import abstract_matrix, attend, linear, random_like, rms_norm, row_by_row, take_rows
from graft_jax.models.transformer import LayerParams
from graft_jax.types import Array, Float, Int


class DominoParams(flax.struct.PyTreeNode):
    """Weights of Domino's head; see `models.domino`. The file's W1 is kept as its two parts."""

    gru_input: Float[Array, "..."]  # M -> 3G, gates in the order r, z, n
    gru_state: Float[Array, "..."]  # G -> 3G
    hidden_down: Float[Array, "..."]  # M -> R
    state_down: Float[Array, "..."]  # G -> R
    up: Float[Array, "V R"]  # rows are gathered by token


class DFlashParams(flax.struct.PyTreeNode):
    """Weights of a block drafter; embedding and head are the target's."""

    fc: Float[Array, "..."]  # taps * M -> M
    hidden_norm: Float[Array, "M"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, "M"]
    domino: DominoParams | None = None


def abstract_params(config: DFlashConfig, dtype) -> DFlashParams:
    """The parameter tree as `jax.ShapeDtypeStruct`s."""
    dtype, M = jnp.dtype(dtype), config.model.hidden_size

    matrix = functools.partial(abstract_matrix, dtype=dtype)
    vector: Any = jax.ShapeDtypeStruct((M,), dtype)
    head = None
    if config.domino is not None:
        G, R = config.domino.gru_size, config.domino.rank
        up: Any = jax.ShapeDtypeStruct((config.model.vocab_size, R), dtype)
        head = DominoParams(matrix(M, 3 * G), matrix(G, 3 * G), matrix(M, R), matrix(G, R), up)
    layers = transformer.abstract_params(config.model, dtype).layers
    return DFlashParams(matrix(len(config.taps) * M, M), vector, layers, vector, head)


def init_params(config: DFlashConfig, key: Array, dtype, std: float = 0.02) -> DFlashParams:
    """Random weights: normal with `std`, norms one."""
    return random_like(abstract_params(config, dtype), key, std)


def to_bfloat16(params: DFlashParams) -> DFlashParams:
    """float32 weights in bfloat16, in its layout. Differentiable."""

    def turn(path, x: Array) -> Array:
        gathered = path[0].name == "domino" and path[-1].name == "up"
        x = x.astype(jnp.bfloat16)
        return row_by_row(x.T) if x.ndim == 2 and not gathered else x

    return jax.tree.map_with_path(turn, params)


def context(
    config: DFlashConfig, params: DFlashParams, taps: tuple[Float[Array, "B T M"], ...], positions: Int[Array, "B T"]
) -> Block:
    """Keys and values of every layer, made of the target's features at `positions`.

    Features are fused once; every layer projects the same result.
    """
    if len(taps) != len(config.taps):
        raise ValueError(f"the drafter takes {len(config.taps)} target features and got {len(taps)}")
    fused = rms_norm(linear(jnp.concatenate(taps, axis=-1), params.fc), params.hidden_norm, config.model.rms_norm_eps)
    rotation = rope.rotation(config.model.rope, config.model.head_dim, positions)
    pairs = [_keys_values(config, layer, fused, rotation) for layer in params.layers]
    keys, values = zip(*pairs)
    return Block(keys, values)


def hidden(
    config: DFlashConfig,
    params: DFlashParams,
    embed: Float[Array, "V M"],
    anchor: Int[Array, "B"],
    cache: KVCache,
    length: Int[Array, "B"],
    block: int = 0,
    start: Int[Array, "B"] | None = None,
) -> Float[Array, "B T M"]:
    """Normed outputs of all T slots.

    Args:
        embed: the target's embedding.
        anchor: the token at position `length`.
        cache: of `context`, for the positions below `length`.
        block: see `layers.attend`.
        start: the first position that is seen; 0 if None.
    """
    model, T, B = config.model, config.block_size, anchor.shape[0]
    H, E, eps = model.num_heads, model.head_dim, model.rms_norm_eps
    tokens = jnp.full((B, T), config.mask_token_id, jnp.int32).at[:, 0].set(anchor)
    x = take_rows(embed, tokens).astype(jnp.float32)
    slot = jnp.arange(T)
    positions = length[:, None] + slot[None, :]
    rotation = rope.rotation(model.rope, E, positions)
    distance = slot[:, None] - slot[None, :]
    for i, layer in enumerate(params.layers):
        y = rms_norm(x, layer.attn_norm, eps)
        q = rms_norm(linear(y, layer.q).reshape(B, T, H, E), _norm(layer.q_norm), eps)
        k, v = _keys_values(config, layer, y, rotation)
        mask = jnp.ones((T, T), bool)
        first = None if start is None else jnp.broadcast_to(start[:, None], (B, T))
        if config.causal[i]:
            mask &= distance >= 0
        if config.windows[i]:
            mask &= jnp.abs(distance) < config.windows[i]
            edge = positions - config.windows[i] + 1
            first = edge if first is None else jnp.maximum(first, edge)
        attended = attend(
            rope.rotate(q, *rotation), cache.keys[i], cache.values[i], length, k.astype(cache.dtype),
            v.astype(cache.dtype), jnp.broadcast_to(mask[None], (B, T, T)), block, first,
        )  # fmt: skip
        x = x + linear(attended, layer.o)
        y = rms_norm(x, layer.mlp_norm, eps)
        x = x + linear(jax.nn.silu(linear(y, layer.gate)) * linear(y, layer.up), layer.down)
    return rms_norm(x, params.norm, eps)


def _keys_values(config: DFlashConfig, layer: LayerParams, x: Float[Array, "B T M"], rotation):
    B, T, _ = x.shape
    K, E = config.model.num_kv_heads, config.model.head_dim
    k = rms_norm(linear(x, layer.k).reshape(B, T, K, E), _norm(layer.k_norm), config.model.rms_norm_eps)
    return rope.rotate(k, *rotation), linear(x, layer.v).reshape(B, T, K, E)


def _norm(weight: Array | None) -> Array:
    assert weight is not None  # the layers are qwen3's
    return weight
