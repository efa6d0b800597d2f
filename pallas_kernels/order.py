"""The order in which values rank, as integers, and the selection loop that all kernels share.

Floats are compared through an order-preserving map to int32, so a NaN or a -0.0 has one place and equality is exact:
NaN above infinity, -0.0 below 0.0, as `jax.lax.top_k` has it.
"""

import jax
import jax.numpy as jnp

ABSENT = -(2**31)  # the key of an entry that must not be chosen before any other


def to_key(x: jax.Array) -> jax.Array:
    """float32 to int32 of the same order."""
    return _flip(jax.lax.bitcast_convert_type(x, jnp.int32))


def from_key(key: jax.Array) -> jax.Array:
    """The inverse of `to_key`."""
    return jax.lax.bitcast_convert_type(_flip(key), jnp.float32)


def _flip(bits: jax.Array) -> jax.Array:
    # Negative floats fall as their bits rise.
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def select(keys: jax.Array, ids: jax.Array, count: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest keys of each row and their ids, inside a kernel: largest first, of equal ones the lowest id.

    An arg-max loop, for neither Triton nor a TPU sorts inside a kernel. Ids must differ within a row.

    Args:
        keys, ids: int32 [r, T].
        width: of the results, at least `count`; what is behind holds `ABSENT` and 0.
    """
    rows = keys.shape[0]
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
    last = jnp.int32(2**31 - 1)

    def take(i, carry):
        keys, ids, best_keys, best_ids = carry
        best = jnp.max(keys, axis=1, keepdims=True)
        where = jnp.min(jnp.where(keys == best, ids, last), axis=1, keepdims=True)
        chosen = ids == where
        best_keys = jnp.where(column == i, best, best_keys)
        best_ids = jnp.where(column == i, where, best_ids)
        # A chosen id leaves for good, also where only absent entries are left.
        return jnp.where(chosen, ABSENT, keys), jnp.where(chosen, last, ids), best_keys, best_ids

    start = (keys, ids, jnp.full((rows, width), ABSENT, jnp.int32), jnp.zeros((rows, width), jnp.int32))
    _, _, best_keys, best_ids = jax.lax.fori_loop(0, count, take, start)
    return best_keys, best_ids
