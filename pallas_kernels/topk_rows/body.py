"""What both backends share: a pass over tiles of the vocabulary, and the passes over what it left."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.order import ABSENT, from_key, select, to_key


def tile_keys(values: jax.Array, first: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Keys and ids of a tile of logits, [r, T], that starts at column `first` of `size`; behind the end all absent."""
    ids = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.where(ids < size, to_key(values.astype(jnp.float32)), ABSENT), ids


def reduce(keys: jax.Array, ids: jax.Array, first: jax.Array, size: int, k: int, width: int):
    """The k best of a tile of candidates that starts at column `first` of `size`."""
    column = first + jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    inside = column < size
    # Absent candidates get ids of their own behind all real ones: no two in a row may be equal.
    absent = (keys == ABSENT) | ~inside
    return select(jnp.where(absent, ABSENT, keys), jnp.where(absent, 2**30 + column, ids), k, width)


def finish(keys: jax.Array, ids: jax.Array, tile: int, k: int, narrow: Callable) -> tuple[jax.Array, jax.Array]:
    """Narrows candidates [N, Q] pass by pass until one tile holds them all, then to values and ids [N, k]."""
    while True:
        last = keys.shape[1] <= tile
        keys, ids = narrow(keys, ids)
        if last:
            return from_key(keys[:, :k]), ids[:, :k]
