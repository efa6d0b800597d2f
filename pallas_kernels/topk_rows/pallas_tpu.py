"""The k best entries of each row on a TPU: the GPU's body over blocks of eight rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.topk_rows import body

ROWS, LANES = 8, 128  # of a TPU's vector register, 32 bit


@dataclasses.dataclass(frozen=True)
class Config:
    """Columns of a tile, a multiple of 128."""

    tile: int = 8192


def unsupported(logits: jax.ShapeDtypeStruct | jax.Array, k: int) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16 logits, got {logits.dtype}"
    if not 1 <= k <= LANES:
        return f"takes k from 1 to {LANES}, got {k}"
    return None


def topk_rows(logits: jax.Array, *, k: int, interpret: bool, config: Config = Config()) -> tuple[jax.Array, jax.Array]:
    """See `api.topk_rows`; logits [N, V]."""
    N, V = logits.shape
    tile = min(config.tile, pl.cdiv(V, LANES) * LANES)

    def launch(kernel, size: int, *arrays: jax.Array):
        tiles = pl.cdiv(size, tile)
        out = jax.ShapeDtypeStruct((N, tiles * LANES), jnp.int32)
        return pl.pallas_call(
            functools.partial(kernel, size=size, k=k, tile=tile),
            out_shape=(out, out),
            grid=(pl.cdiv(N, ROWS), tiles),
            # Blocks over an edge are filled with anything, and what they write there is dropped.
            in_specs=[pl.BlockSpec((ROWS, tile), lambda row, t: (row, t))] * len(arrays),
            out_specs=[pl.BlockSpec((ROWS, LANES), lambda row, t: (row, t))] * 2,
            interpret=interpret,
            name="topk_rows",
        )(*arrays)

    keys, ids = launch(_tile_kernel, V, logits)
    return body.finish(keys, ids, tile, k, lambda keys, ids: launch(_narrow_kernel, keys.shape[1], keys, ids))


def _tile_kernel(logits_ref, keys_ref, ids_ref, *, size: int, k: int, tile: int):
    first = pl.program_id(1) * tile  # logits [8, tile]; keys, ids [8, 128]
    keys, ids = body.tile_keys(logits_ref[...], first, size)
    keys_ref[...], ids_ref[...] = body.reduce(keys, ids, first, size, k, LANES)


def _narrow_kernel(old_keys_ref, old_ids_ref, keys_ref, ids_ref, *, size: int, k: int, tile: int):
    first = pl.program_id(1) * tile  # old [8, tile]; keys, ids [8, 128]
    keys_ref[...], ids_ref[...] = body.reduce(old_keys_ref[...], old_ids_ref[...], first, size, k, LANES)
