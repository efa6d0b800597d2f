"""The k best entries of each row on a GPU, through Triton.

One program a row and tile of the vocabulary leaves its k best; a second launch narrows these. An H200 has 132
processors: 17 rows of 151,936 logits are 646 programs of 4,096.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.order import ABSENT
from pallas_kernels.topk_rows import body


@dataclasses.dataclass(frozen=True)
class Config:
    """Entries a program, a power of two, and the warps that share them."""

    tile: int = 4096
    num_warps: int = 8


def unsupported(logits: jax.ShapeDtypeStruct | jax.Array, k: int) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes float32, bfloat16 and float16 logits, got {logits.dtype}"
    if not 1 <= k <= 512:
        return f"takes k from 1 to 512, got {k}"
    return None


def topk_rows(logits: jax.Array, *, k: int, interpret: bool, config: Config = Config()) -> tuple[jax.Array, jax.Array]:
    """See `api.topk_rows`; logits [N, V]."""
    N, V = logits.shape
    width, tile = pl.next_power_of_2(k), min(config.tile, max(pl.next_power_of_2(V), 16))

    def launch(kernel, size: int, *arrays: jax.Array):
        tiles = pl.cdiv(size, tile)
        out = jax.ShapeDtypeStruct((N, tiles * width), jnp.int32)
        return pl.pallas_call(
            functools.partial(kernel, size=size, k=k, width=width, tile=tile),
            out_shape=(out, out),
            grid=(N, tiles),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
            out_specs=[pl.BlockSpec((1, width), lambda row, t: (row, t))] * 2,
            compiler_params=triton.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=interpret,
            name="topk_rows",
        )(*arrays)

    keys, ids = launch(_tile_kernel, V, logits)
    return body.finish(keys, ids, tile, k, lambda keys, ids: launch(_narrow_kernel, keys.shape[1], keys, ids))


def _at(tile: int, size: int):
    """This program's row, first column, and the columns of its tile that exist."""
    row, first = pl.program_id(0), pl.program_id(1) * tile
    return row, first, first + jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1)


def _tile_kernel(logits_ref, keys_ref, ids_ref, *, size: int, k: int, width: int, tile: int):
    row, first, column = _at(tile, size)  # logits [N, V]; keys, ids [1, width]
    values = triton.load(logits_ref.at[row, column], mask=column < size, other=0.0)
    keys, ids = body.tile_keys(values, first, size)
    keys_ref[...], ids_ref[...] = body.reduce(keys, ids, first, size, k, width)


def _narrow_kernel(old_keys_ref, old_ids_ref, keys_ref, ids_ref, *, size: int, k: int, width: int, tile: int):
    row, first, column = _at(tile, size)  # old [N, Q]; keys, ids [1, width]
    keys = triton.load(old_keys_ref.at[row, column], mask=column < size, other=ABSENT)
    ids = triton.load(old_ids_ref.at[row, column], mask=column < size, other=0)
    keys_ref[...], ids_ref[...] = body.reduce(keys, ids, first, size, k, width)
