"""A template's tokens from the successor table on a GPU, through Triton: one launch for all levels.

A lane walks down to one node by itself, along that node's rank path. It reads again what its siblings read, from
the cache, and needs nothing of them: Triton has no gather of values, and levels need no launch of their own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.retrieval_lookup.hashing import row_and_tag
from pallas_kernels.retrieval_lookup.reference import ABSENT
from pallas_kernels.retrieval_lookup.template import plan


@dataclasses.dataclass(frozen=True)
class Config:
    """Lanes a program, a power of two, and the warps that share them."""

    lanes: int = 32
    num_warps: int = 1


def unsupported(levels, context, *, parents, ranks) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    for successors, tags in levels:
        if successors.dtype != jnp.int32 or (tags is not None and tags.dtype != jnp.uint32):
            return f"takes int32 successors and uint32 tags, got {successors.dtype} and {tags and tags.dtype}"
        if successors.size >= 2**31:
            return f"takes tables of less than 2**31 entries, got {successors.shape}"
    if context.dtype != jnp.int32:
        return f"takes int32 contexts, got {context.dtype}"
    return None


def retrieval_lookup(levels, context, *, parents, ranks, interpret: bool, config: Config = Config()):
    """See `api.retrieval_lookup`."""
    (A, O), n, orders = context.shape, len(parents), len(levels)
    lanes = config.lanes
    groups = pl.cdiv(n, lanes)
    paths = np.pad(plan(parents, ranks).paths, ((0, 0), (0, groups * lanes - n)), constant_values=-1)
    arrays = [context, jnp.asarray(paths)]
    for successors, tags in levels:
        arrays += [successors] if tags is None else [successors, tags]
    out = jax.ShapeDtypeStruct((A, groups * lanes), jnp.int32)
    tokens = pl.pallas_call(
        functools.partial(_kernel, orders=orders, length=O),
        out_shape=out,
        grid=(A, groups),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=pl.BlockSpec((1, lanes), lambda a, g: (a, g)),
        compiler_params=triton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="retrieval_lookup",
    )(*arrays)[:, :n]
    return jnp.maximum(tokens, 0), tokens != ABSENT


def _kernel(context_ref, paths_ref, *refs, orders: int, length: int):
    tables, tokens_ref = refs[:-1], refs[-1]  # context [A, O]; paths [D, n']; tokens [1, lanes]
    a, lanes = pl.program_id(0), tokens_ref.shape[1]
    lane = pl.program_id(1) * lanes + jax.lax.iota(jnp.int32, lanes)
    last = tables[-1]  # of order 1; a level of a higher order is two refs
    num_tokens = last.shape[0]

    def find(context, rank, live):
        """The successor of that rank, of the longest known suffix."""
        found = jnp.full((lanes,), ABSENT, jnp.int32)
        for order in range(1, orders + 1):
            tokens = context[length - order :]
            known = live
            for token in tokens:
                known &= token >= 0
            if order == 1:
                table, row = last, tokens[0]
                known &= row < num_tokens
            else:
                table, tags = tables[2 * (orders - order)], tables[2 * (orders - order) + 1]
                row, tag = row_and_tag(tokens, table.shape[0])
                known &= triton.load(tags.at[row], mask=known, other=jnp.uint32(0)) == tag
            row = jnp.where(known, row, 0)  # every row that is read exists
            best = triton.load(table.at[row, jnp.zeros_like(row)], mask=known, other=ABSENT)
            token = triton.load(table.at[row, rank], mask=known, other=ABSENT)
            found = jnp.where(known & (best != ABSENT), token, found)
        return jnp.where((found >= 0) & (found < num_tokens), found, ABSENT)

    def down(d, carry):
        context, token = carry
        rank = triton.load(paths_ref.at[d, lane])
        live = rank >= 0
        found = find(context, jnp.where(live, rank, 0), live)
        return (*context[1:], found), jnp.where(live, found, token)

    start = tuple(jnp.full((lanes,), context_ref[a, i], jnp.int32) for i in range(length))
    empty = jnp.full((lanes,), ABSENT, jnp.int32)
    _, token = jax.lax.fori_loop(0, paths_ref.shape[0], down, (start, empty))
    tokens_ref[0, :] = token
