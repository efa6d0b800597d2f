"""The EAGLE-3 draft head as pure functions of its parameters (`cnets.py` of the reference; speculators).

At position i the head sees the target's features there and the token at i + 1, and says the token at i + 2.
Where no features are known yet it goes on from its own output instead.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.models import rope
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import abstract_matrix, linear, random_like, rms_norm, row_by_row, take_rows
from graft_jax.types import Array, Float, Int


class Eagle3Params(flax.struct.PyTreeNode):
    """Weights of the head; linear ones as `layers.linear` wants them.

    `draft_to_target` holds target ids (files hold offsets); None where both vocabularies are one. `embed` is
    None where the target's embedding serves.
    """

    fc: Float[Array, "..."]  # taps * Mt -> M
    embed_norm: Float[Array, "M"]
    hidden_norm: Float[Array, "M"]
    q: Float[Array, "..."]  # 2M -> H*E
    k: Float[Array, "..."]  # 2M -> K*E
    v: Float[Array, "..."]  # 2M -> K*E
    o: Float[Array, "..."]  # H*E -> M
    mlp_norm: Float[Array, "M"]
    gate: Float[Array, "..."]  # M -> F
    up: Float[Array, "..."]  # M -> F
    down: Float[Array, "..."]  # F -> M
    norm: Float[Array, "M"]
    head: Float[Array, "..."]  # M -> Vd
    draft_to_target: Int[Array, "Vd"] | None = None
    embed: Float[Array, "V M"] | None = None
    q_norm: Float[Array, "E"] | None = None
    k_norm: Float[Array, "E"] | None = None
    input_norm: Float[Array, "I"] | None = None
    fc_norms: tuple[Float[Array, "Mt"], ...] = ()


class Projected(flax.struct.PyTreeNode):
    """What the layer makes of its input before attention."""

    residual: Float[Array, "B T M"]
    query: Float[Array, "B T H E"]
    key: Float[Array, "B T K E"]
    value: Float[Array, "B T K E"]


def abstract_params(config: Eagle3Config, dtype, *, own_embed: bool = False) -> Eagle3Params:
    """The parameter tree as `jax.ShapeDtypeStruct`s."""
    dtype = jnp.dtype(dtype)
    M, F, E, V = config.hidden_size, config.intermediate_size, config.head_dim, config.draft_vocab_size
    H, K, Mt, n = config.num_heads, config.num_kv_heads, config.target_hidden_size, len(config.taps)

    def array(*shape) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    matrix = functools.partial(abstract_matrix, dtype=dtype)

    reduced: Any = None if V == config.vocab_size else jax.ShapeDtypeStruct((V,), jnp.int32)
    return Eagle3Params(
        fc=matrix(n * Mt, M), embed_norm=array(M), hidden_norm=array(M), q=matrix(2 * M, H * E),
        k=matrix(2 * M, K * E), v=matrix(2 * M, K * E), o=matrix(H * E, M), mlp_norm=array(M),
        gate=matrix(M, F), up=matrix(M, F), down=matrix(F, M), norm=array(M), head=matrix(M, V),
        draft_to_target=reduced,
        embed=array(config.vocab_size, M) if own_embed else None,
        q_norm=array(E) if config.qk_norm else None, k_norm=array(E) if config.qk_norm else None,
        input_norm=array(n * Mt) if config.norm_before_fc else None,
        fc_norms=(array(Mt),) * n if config.fc_norm else (),
    )  # fmt: skip


LINEAR = ("fc", "q", "k", "v", "o", "gate", "up", "down", "head")


def to_bfloat16(params: Eagle3Params) -> Eagle3Params:
    """float32 weights in bfloat16, in its layout. Differentiable."""
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
    return halves.replace(**{name: row_by_row(getattr(halves, name).T) for name in LINEAR})


def init_params(config: Eagle3Config, key: Array, dtype, std: float = 0.02) -> Eagle3Params:
    """Random weights: normal with `std`, norms one; drafts the first ids of a reduced vocabulary."""
    return random_like(abstract_params(config, dtype), key, std)


def fuse(config: Eagle3Config, params: Eagle3Params, taps: tuple[Float[Array, "B T Mt"], ...]) -> Float[Array, "B T M"]:
    """Target features to the head's width: concatenated low to high, then fc."""
    if len(taps) != len(config.taps):
        raise ValueError(f"the head takes {len(config.taps)} target features and got {len(taps)}")
    if params.fc_norms:
        taps = tuple(rms_norm(tap, norm, config.rms_norm_eps) for tap, norm in zip(taps, params.fc_norms))
    x = jnp.concatenate(taps, axis=-1)
    if params.input_norm is not None:
        x = rms_norm(x, params.input_norm, config.rms_norm_eps)
    return linear(x, params.fc)


def project(
    config: Eagle3Config,
    params: Eagle3Params,
    target_embed: Float[Array, "V M"],
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
) -> Projected:
    """Queries, keys and values of the double-width layer.

    Args:
        tokens: the token after each position.
        hidden: fused features, or the head's own recurrent output.
        positions: of the features (one less than the token's).
    """
    B, T = tokens.shape
    eps = config.rms_norm_eps
    embed = target_embed if params.embed is None else params.embed
    e = take_rows(embed, tokens).astype(jnp.float32)
    normed = rms_norm(hidden, params.hidden_norm, eps)
    x = jnp.concatenate([rms_norm(e, params.embed_norm, eps), normed], axis=-1)
    q = linear(x, params.q).reshape(B, T, config.num_heads, config.head_dim)
    k = linear(x, params.k).reshape(B, T, config.num_kv_heads, config.head_dim)
    v = linear(x, params.v).reshape(B, T, config.num_kv_heads, config.head_dim)
    if params.q_norm is not None and params.k_norm is not None:
        q, k = rms_norm(q, params.q_norm, eps), rms_norm(k, params.k_norm, eps)
    cos, sin = rope.rotation(config.rope, config.head_dim, positions)
    residual = normed if config.norm_before_residual else hidden
    return Projected(residual, rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v)


def finish(
    config: Eagle3Config, params: Eagle3Params, residual: Float[Array, "B T M"], attended: Float[Array, "B T HE"]
) -> Float[Array, "B T M"]:
    """The rest of the layer: the output that recurses."""
    x = residual + linear(attended, params.o)
    y = rms_norm(x, params.mlp_norm, config.rms_norm_eps)
    y = jax.nn.silu(linear(y, params.gate)) * linear(y, params.up)
    x = x + linear(y, params.down)
    return rms_norm(x, params.norm, config.rms_norm_eps) if config.recurse_normed else x


def logits(config: Eagle3Config, params: Eagle3Params, output: Float[Array, "B T M"]) -> Float[Array, "B T Vd"]:
    """Logits over the draft vocabulary, float32, of what `finish` gave."""
    return linear(normed(config, params, output), params.head)


def normed(config: Eagle3Config, params: Eagle3Params, output: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """What the head's rows multiply."""
    return output if config.recurse_normed else rms_norm(output, params.norm, config.rms_norm_eps)
