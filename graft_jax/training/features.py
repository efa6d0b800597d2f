"""What a drafter learns from: the target's features, its last hidden states and its own choices."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.models import cache as kv
from graft_jax.models import transformer
from graft_jax.models.transformer import TargetParams
from graft_jax.training import attention
from graft_jax.types import Array, Bool, Float, Int

CHUNK = 256  # rows of logits held at a time


class Features(flax.struct.PyTreeNode):
    """A batch of texts as the target sees them.

    Attributes:
        tokens: the texts.
        taps: residual streams, in the order of the drafter's taps.
        hidden: after the last norm; logits are the head's product with it.
        best: the arg-max token after each position.
        mask: which tokens count as labels (the assistant's).
        segments: several texts may stand in one row: numbers from 1, 0 where there is none. Texts see only
            themselves.
    """

    tokens: Int[Array, "B S"]
    taps: tuple[Float[Array, "B S M"], ...]
    hidden: Float[Array, "B S M"]
    best: Int[Array, "B S"]
    mask: Bool[Array, "B S"]
    segments: Int[Array, "B S"]


def of_logits(
    config: ModelConfig, params: TargetParams, hidden: Float[Array, "B S M"], function: Callable[[Array], Any]
) -> Any:
    """`function` of the logits [c, V], some rows at a time; its arrays [c, ...] come back as [B, S, ...]."""
    B, S, M = hidden.shape
    chunks = jnp.pad(hidden.reshape(B * S, M), ((0, -(B * S) % CHUNK), (0, 0))).reshape(-1, CHUNK, M)
    found = jax.lax.map(lambda rows: function(transformer.logits(config, params, rows[None])[0]), chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: B * S].reshape(B, S, *x.shape[2:]), found)


def positions(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Places within the texts of a row."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1])[None, :], segments.shape)
    first = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)


def _attend_texts(
    query: Float[Array, "B S H E"],
    cache_keys: Array,
    cache_values: Array,
    cached: Array,
    keys: Float[Array, "B S K E"],
    values: Float[Array, "B S K E"],
    segments: Int[Array, "B S"],
    block: int,
) -> Float[Array, "B S H*E"]:
    """`layers.attend` for whole texts: nothing is cached, and no more than some rows of scores are held."""
    return attention.attend_heads(query, keys, values, [], segments)


def extract(
    config: ModelConfig,
    params: TargetParams,
    taps: tuple[int, ...],
    tokens: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    segments: Int[Array, "B S"] | None = None,
) -> Features:
    """One pass of the target over whole texts.

    Args:
        mask: leaves padding out, which belongs behind the texts.
        segments: one text a row if None.
    """
    B, S = tokens.shape
    if segments is None:
        segments = jnp.ones((B, S), jnp.int32)
    out = transformer.forward(
        config, params, tokens,
        positions=positions(segments),
        mask=segments,
        cache=kv.init(config, B, 1, params.dtype),
        cached=jnp.zeros(B, jnp.int32),
        taps=taps,
        attend=_attend_texts,
    )  # fmt: skip

    best = of_logits(
        config, params, out.hidden, lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    )  # fmt: skip
    return jax.lax.stop_gradient(Features(tokens, out.taps, out.hidden, best, mask, segments))
