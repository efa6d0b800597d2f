"""The key/value cache: committed rows only, one pair of arrays a layer.

Keys are [B, K, E, S] and values [B, K, S, E], the layouts in which attention reads them; with the plain
[B, S, K, E] a CPU transposes the whole cache in every step. Layers stay apart, for a slice of one stacked
array is copied. On a CPU the cache is float32 even under bfloat16 weights: XLA:CPU updates no bfloat16 slice in
place, it would convert the whole cache on the way into every loop and out again.
"""

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.types import Array, Bool, Float, Int


class Block(flax.struct.PyTreeNode):
    """Keys and values of the rows of one forward pass, not yet committed."""

    keys: tuple[Float[Array, "B T K E"], ...]
    values: tuple[Float[Array, "B T K E"], ...]


class KVCache(flax.struct.PyTreeNode):
    """Committed keys and values of every layer."""

    keys: tuple[Float[Array, "B K E S"], ...]
    values: tuple[Float[Array, "B K S E"], ...]

    @property
    def dtype(self):
        return self.values[0].dtype


def init(config: ModelConfig, batch: int, size: int, dtype) -> KVCache:
    """An empty cache of `size` rows. `dynamic_update_slice` clamps, so `size` must hold every write."""
    K, E, layers = config.num_kv_heads, config.head_dim, range(config.num_layers)
    return KVCache(
        keys=tuple(jnp.zeros((batch, K, E, size), dtype) for _ in layers),
        values=tuple(jnp.zeros((batch, K, size, E), dtype) for _ in layers),
    )


def commit(cache: KVCache, block: Block, path: Int[Array, "B P"], lengths: Int[Array, "B"]) -> KVCache:
    """Writes the block's rows `path` to cache rows `lengths ... lengths + P - 1` of each batch row.

    Rows behind the accepted ones hold leftovers, which nothing reads: a row's length says what counts.
    The caller keeps `lengths + P <= S`.
    """
    rows = jax.tree.map(lambda x: jnp.take_along_axis(x, path[:, :, None, None], axis=1), block)
    keys, values = [], []
    for old_k, old_v, new_k, new_v in zip(cache.keys, cache.values, rows.keys, rows.values, strict=True):
        new_k = new_k.transpose(0, 2, 3, 1).astype(old_k.dtype)
        new_v = new_v.transpose(0, 2, 1, 3).astype(old_v.dtype)
        for b in range(lengths.shape[0]):  # separate slices stay in place; a batched one is a scatter
            old_k = jax.lax.dynamic_update_slice(old_k, new_k[b : b + 1], (b, 0, 0, lengths[b]))
            old_v = jax.lax.dynamic_update_slice(old_v, new_v[b : b + 1], (b, 0, lengths[b], 0))
        keys.append(old_k)
        values.append(old_v)
    return KVCache(keys=tuple(keys), values=tuple(values))


def commit_chunk(cache: KVCache, block: Block, start: Int[Array, ""], valid: Bool[Array, "B T"]) -> KVCache:
    """Writes a prefill chunk: all T rows at cache rows `start ...`, keeping old rows where not `valid`."""
    T = valid.shape[1]
    keys, values = [], []
    for old_k, old_v, new_k, new_v in zip(cache.keys, cache.values, block.keys, block.values, strict=True):
        before_k = jax.lax.dynamic_slice_in_dim(old_k, start, T, axis=3)
        before_v = jax.lax.dynamic_slice_in_dim(old_v, start, T, axis=2)
        new_k = jnp.where(valid[:, None, None, :], new_k.transpose(0, 2, 3, 1), before_k)
        new_v = jnp.where(valid[:, None, :, None], new_v.transpose(0, 2, 1, 3), before_v)
        keys.append(jax.lax.dynamic_update_slice_in_dim(old_k, new_k, start, axis=3))
        values.append(jax.lax.dynamic_update_slice_in_dim(old_v, new_v, start, axis=2))
    return KVCache(keys=tuple(keys), values=tuple(values))
