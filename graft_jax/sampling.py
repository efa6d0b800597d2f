"""From logits to the chosen token: the only place that knows temperature, top-k, top-p and min-p.

The target chooses its own next token at an absolute position: the arg-max at temperature 0, else the
arg-max of the processed logits plus Gumbel noise. The noise depends on the row's key and the position
alone, so plain and speculative decoding choose the same tokens ("sample and match").
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.types import Array, Bool, Float, Int


class Sampling(flax.struct.PyTreeNode):
    """Sampling settings of each batch row, as arrays: changing them compiles nothing.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        key: the row's random key; never consumed, only folded with positions.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    key: Array  # [B] typed keys


def make(
    seeds: Sequence[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampling:
    """Builds settings for `len(seeds)` rows.

    Raises:
        ValueError: a value lies outside its range.
    """
    if not temperature >= 0 or temperature == float("inf"):
        raise ValueError(f"temperature={temperature!r} must be a finite number of at least 0")
    if top_k < 0:
        raise ValueError(f"top_k={top_k!r} must be at least 0 (0 keeps all tokens)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p!r} must be above 0 and at most 1")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p!r} must be between 0 and 1")
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed!r} must be between 0 and 2**32 - 1")
    batch = len(seeds)
    return Sampling(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
        key=jax.vmap(jax.random.key)(jnp.array(seeds, jnp.uint32)),
    )


def first_argmax(scores: Float[Array, "*N V"]) -> Int[Array, "*N"]:
    """The lowest index of the maximum. (Ten times faster than `argmax` on a CPU.)"""
    V = scores.shape[-1]
    best = scores.max(axis=-1, keepdims=True)
    index = jnp.where(scores == best, jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1), V)
    return jnp.minimum(index.min(axis=-1), V - 1)  # all-NaN rows stay inside the vocabulary


def choose(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, "B"]) -> Int[Array, "B"]:
    """The token that the target puts at `position`, given the logits of the position before.

    Args:
        logits: float32.
        position: absolute position of the token to choose; it keys the noise.
    """
    return first_argmax(scores(logits, sampling, position))


def scores(logits: Float[Array, "B V"], sampling: Sampling, position: Int[Array, "B"]) -> Float[Array, "B V"]:
    """What `choose` takes the arg-max of; differences between two tokens are the margin of the choice."""

    def sampled() -> Array:
        keys = jax.vmap(jax.random.fold_in)(sampling.key, position)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        greedy = (sampling.temperature <= 0)[:, None]
        return jnp.where(greedy, logits, process(logits, sampling) + noise)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: logits)


def process(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Temperature, then top-k, top-p and min-p, in transformers' order; removed tokens are -inf.

    Top-k keeps every token that ties with the k-th, and top-p every token that ties with the last one
    needed to reach the mass (transformers breaks such ties by its sort order). Nothing is sorted: the
    thresholds are found bit by bit.
    """
    x = logits / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    V = x.shape[-1]

    def top_k(x: Array) -> Array:
        wanted = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)
        return _keep_largest(x, lambda kept: kept.sum(axis=-1) >= wanted)

    def top_p(x: Array) -> Array:
        mass = jax.nn.softmax(x, axis=-1)

        def enough(kept: Array) -> Array:
            total = jnp.where(kept, mass, 0.0).sum(axis=-1)
            return (total >= sampling.top_p) & (sampling.top_p < 1)

        return _keep_largest(x, enough)

    def min_p(x: Array) -> Array:
        floor = x.max(axis=-1, keepdims=True) + jnp.log(sampling.min_p)[:, None]
        return jnp.where(x >= floor, x, -jnp.inf)

    x = jax.lax.cond(jnp.any(sampling.top_k > 0), top_k, lambda x: x, x)
    x = jax.lax.cond(jnp.any(sampling.top_p < 1), top_p, lambda x: x, x)
    return jax.lax.cond(jnp.any(sampling.min_p > 0), min_p, lambda x: x, x)


def _keep_largest(
    x: Float[Array, "B V"], enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]
) -> Float[Array, "B V"]:
    """Keeps `x >= t` for the largest t whose kept set is `enough`, a monotone condition; else all.

    The order of floats is the order of their bits once negative ones are flipped, so t is built from the
    highest bit down: 32 exact steps instead of a sort.
    """
    x = jnp.where(x == 0, 0.0, x)  # not -0.0, so that equal floats have equal bits (XLA drops `+ 0.0`)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def step(i, threshold):
        candidate = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(ordered >= candidate[:, None]), candidate, threshold)

    threshold = jax.lax.fori_loop(0, 32, step, jnp.zeros(x.shape[0], jnp.uint32))
    return jnp.where(ordered >= threshold[:, None], x, -jnp.inf)
