"""What both backends share: from the correction of a tile of lanes to the best candidates of each."""

import jax
import jax.numpy as jnp

from pallas_kernels.order import ABSENT, from_key, select, to_key


def silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))


def product(compressed: jax.Array, rows: jax.Array) -> jax.Array:
    """[L, R] times [C, R], accumulated in float32."""
    return jax.lax.dot_general(
        compressed.astype(rows.dtype),
        rows,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def best(correction, base, tokens, rest, candidates: int, children: int, width: int):
    """Tokens and log-probabilities, [L, width], of each lane's best candidates.

    Args:
        correction: float32 [L, C'], of which the first `candidates` columns count.
        base, tokens: [1, C'].
        rest: [1, 1], log of the mass of what is no candidate.
    """
    lanes = correction.shape[0]
    column = jax.lax.broadcasted_iota(jnp.int32, correction.shape, 1)
    inside = column < candidates
    corrected = jnp.where(inside, base + correction, -jnp.inf)
    peak = jnp.maximum(jnp.max(corrected, axis=1, keepdims=True), rest)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    total = jnp.sum(jnp.exp(corrected - shift), axis=1, keepdims=True) + jnp.exp(rest - shift)
    mass = jnp.where(peak == -jnp.inf, 0.0, jnp.log(total) + shift)
    log_probs = jnp.where(corrected == -jnp.inf, -jnp.inf, corrected - mass)
    keys, index = select(jnp.where(inside, to_key(log_probs), ABSENT), column, children, width)
    # From places to tokens by comparing, for values cannot be gathered inside a kernel.
    slot = jax.lax.broadcasted_iota(jnp.int32, (lanes, width), 1)

    def name(i, found):
        here = jnp.max(jnp.where(slot == i, index, 0), axis=1, keepdims=True)
        token = jnp.max(jnp.where(column == here, tokens, ABSENT), axis=1, keepdims=True)
        return jnp.where(slot == i, token, found)

    found = jax.lax.fori_loop(0, children, name, jnp.zeros((lanes, width), jnp.int32))
    return found, from_key(keys)
