"""The target: a llama, qwen2 or qwen3 decoder as pure functions of its parameters."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.models import rope
from graft_jax.models.cache import Block, KVCache
from graft_jax.models.layers import abstract_matrix, attend, linear, matmul, random_like, rms_norm, take_rows
from graft_jax.types import Array, Bool, Float, Int


class LayerParams(flax.struct.PyTreeNode):
    """Weights of one decoder layer; linear ones as `layers.linear` wants them, biases None if absent."""

    attn_norm: Float[Array, "M"]
    q: Float[Array, "..."]  # M -> H*E
    k: Float[Array, "..."]  # M -> K*E
    v: Float[Array, "..."]  # M -> K*E
    o: Float[Array, "..."]  # H*E -> M
    mlp_norm: Float[Array, "M"]
    gate: Float[Array, "..."]  # M -> F
    up: Float[Array, "..."]  # M -> F
    down: Float[Array, "..."]  # F -> M
    q_bias: Float[Array, "HE"] | None = None
    k_bias: Float[Array, "KE"] | None = None
    v_bias: Float[Array, "KE"] | None = None
    o_bias: Float[Array, "M"] | None = None
    q_norm: Float[Array, "E"] | None = None
    k_norm: Float[Array, "E"] | None = None
    gate_bias: Float[Array, "F"] | None = None
    up_bias: Float[Array, "F"] | None = None
    down_bias: Float[Array, "M"] | None = None


class TargetParams(flax.struct.PyTreeNode):
    """Weights of the whole model. `head` is None when the embedding serves as the head."""

    embed: Float[Array, "V M"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, "M"]
    head: Float[Array, "..."] | None = None  # M -> V

    @property
    def dtype(self):
        return self.embed.dtype


class Output(flax.struct.PyTreeNode):
    """What a forward pass leaves: `hidden` after the last norm, the tapped residuals, the new block."""

    hidden: Float[Array, "B T M"]
    taps: tuple[Float[Array, "B T M"], ...]
    block: Block


def abstract_params(config: ModelConfig, dtype) -> TargetParams:
    """The parameter tree as `jax.ShapeDtypeStruct`s: for compiling, loading and checking without weights."""
    dtype = jnp.dtype(dtype)
    M, F, E = config.hidden_size, config.intermediate_size, config.head_dim
    H, K, V = config.num_heads, config.num_kv_heads, config.vocab_size

    def array(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    matrix = functools.partial(abstract_matrix, dtype=dtype)

    def when(condition: bool, *shape) -> Any:
        return array(*shape) if condition else None

    layer = LayerParams(
        attn_norm=array(M), q=matrix(M, H * E), k=matrix(M, K * E), v=matrix(M, K * E), o=matrix(H * E, M),
        mlp_norm=array(M), gate=matrix(M, F), up=matrix(M, F), down=matrix(F, M),
        q_bias=when(config.qkv_bias, H * E), k_bias=when(config.qkv_bias, K * E),
        v_bias=when(config.qkv_bias, K * E), o_bias=when(config.o_bias, M),
        q_norm=when(config.qk_norm, E), k_norm=when(config.qk_norm, E),
        gate_bias=when(config.mlp_bias, F), up_bias=when(config.mlp_bias, F),
        down_bias=when(config.mlp_bias, M),
    )  # fmt: skip
    return TargetParams(
        embed=array(V, M),
        layers=(layer,) * config.num_layers,
        norm=array(M),
        head=None if config.tie_embeddings else matrix(M, V),
    )


def init_params(config: ModelConfig, key: Array, dtype, std: float = 0.02) -> TargetParams:
    """Random weights: normal with `std`, norms one. For tests and for training from scratch."""
    return random_like(abstract_params(config, dtype), key, std)


def forward(
    config: ModelConfig,
    params: TargetParams,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"] | Int[Array, "B T"],
    cache: KVCache,
    cached: Int[Array, "B"],
    taps: tuple[int, ...] = (),
    block: int = 0,
    attend: Callable = attend,
) -> Output:
    """Runs T rows against the committed cache and one another.

    Args:
        tokens: ids; must lie inside the vocabulary.
        positions: absolute positions (a tree row's is the cached length plus its depth).
        mask: which rows of the block each row sees; every row must see itself.
        cache: committed keys and values.
        cached: how many cache rows count, by batch row.
        taps: layer numbers; tap i is the residual stream before layer i, `num_layers` the one after the
            last layer; never normed.
        block: see `layers.attend`.
        attend: called as `layers.attend` is; may want another kind of mask.

    Returns:
        The rows' final hidden states, taps in the order asked, and keys and values to commit.
    """
    x = take_rows(params.embed, tokens).astype(jnp.float32)
    cos, sin = rope.rotation(config.rope, config.head_dim, positions)
    tapped: dict[int, Array] = {}
    keys, values = [], []
    for i, layer in enumerate(params.layers):
        if i in taps:
            tapped[i] = x
        x, k, v = _layer(config, layer, x, cos, sin, mask, cache.keys[i], cache.values[i], cached, block, attend)
        keys.append(k)
        values.append(v)
    if len(params.layers) in taps:
        tapped[len(params.layers)] = x
    return Output(
        hidden=rms_norm(x, params.norm, config.rms_norm_eps),
        taps=tuple(tapped[i] for i in taps),
        block=Block(keys=tuple(keys), values=tuple(values)),
    )


@functools.partial(jax.jit, static_argnums=(0, 9, 10))
def _layer(
    config: ModelConfig,
    layer: LayerParams,
    x: Float[Array, "B T M"],
    cos: Float[Array, "B T E2"],
    sin: Float[Array, "B T E2"],
    mask: Bool[Array, "B T T"] | Int[Array, "B T"],
    cache_keys: Float[Array, "B K E S"],
    cache_values: Float[Array, "B K S E"],
    cached: Int[Array, "B"],
    block: int,
    attend: Callable,
) -> tuple[Float[Array, "B T M"], Float[Array, "B T K E"], Float[Array, "B T K E"]]:
    """One layer: the residual stream after it, and the rows' keys and values.

    Jitted so that layers of the same shape are traced and lowered once.
    """
    B, T, _ = x.shape
    H, K, E = config.num_heads, config.num_kv_heads, config.head_dim
    eps, dtype = config.rms_norm_eps, cache_keys.dtype
    y = rms_norm(x, layer.attn_norm, eps)
    q = linear(y, layer.q, layer.q_bias).reshape(B, T, H, E)
    k = linear(y, layer.k, layer.k_bias).reshape(B, T, K, E)
    v = linear(y, layer.v, layer.v_bias).reshape(B, T, K, E).astype(dtype)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
    q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin).astype(dtype)
    attended = attend(q, cache_keys, cache_values, cached, k, v, mask, block)
    x = x + linear(attended, layer.o, layer.o_bias)
    y = rms_norm(x, layer.mlp_norm, eps)
    y = jax.nn.silu(linear(y, layer.gate, layer.gate_bias)) * linear(y, layer.up, layer.up_bias)
    return x + linear(y, layer.down, layer.down_bias), k, v


def logits(config: ModelConfig, params: TargetParams, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
    """Next-token logits, float32. Ids that no token has (padding rows of the embedding) get -inf."""
    out = matmul(hidden, params.embed, 1) if params.head is None else linear(hidden, params.head)
    if config.num_tokens < config.vocab_size:
        out = jnp.where(jnp.arange(config.vocab_size)[None, None, :] < config.num_tokens, out, -jnp.inf)
    return out
