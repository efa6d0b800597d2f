"""Where a context stands in a hashed level of the successor table. The same code runs in XLA and inside kernels."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def row_and_tag(tokens: Sequence[jax.Array], num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Row and tag of a context.

    Args:
        tokens: int32, oldest first, all of one shape; any number is safe.
        num_rows: a power of two.

    Returns:
        The row, int32 in [0, num_rows), and the tag, uint32, which tells contexts apart that share a row.
    """
    mixed = jnp.full(tokens[0].shape, 0x9E3779B9, jnp.uint32)
    for token in tokens:
        mixed = _mix(mixed ^ token.astype(jnp.uint32))
    # The row takes the low bits of the hash and the tag all bits of a second mix.
    row = (mixed & jnp.uint32(num_rows - 1)).astype(jnp.int32)
    return row, _mix(mixed + jnp.uint32(0x85EBCA6B))


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit mixer (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
