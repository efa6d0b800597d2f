"""A template's tokens from the successor table on a TPU: the scalar core walks, rows come in by DMA.

Level by level: the rows that all nodes of a level need are fetched together, one transfer each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.retrieval_lookup import pallas_triton
from pallas_kernels.retrieval_lookup.hashing import row_and_tag
from pallas_kernels.retrieval_lookup.reference import ABSENT
from pallas_kernels.retrieval_lookup.template import plan

TAGS = 1024  # tags come in blocks of this alignment
FETCHES = 128  # rows and blocks of tags, 4 KB each, that are fetched at once into scalar memory (1 MB)


def unsupported(levels, context, *, parents, ranks) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    widest = int(np.bincount(plan(parents, ranks).depth).max())
    if widest * len(levels) > FETCHES:
        return (
            f"takes template levels of at most {FETCHES // len(levels)} nodes with {len(levels)} levels, got {widest}"
        )
    return pallas_triton.unsupported(levels, context, parents=parents, ranks=ranks)


def retrieval_lookup(levels, context, *, parents, ranks, interpret: bool):
    """See `api.retrieval_lookup`."""
    (A, O), n, orders = context.shape, len(parents), len(levels)
    facts = plan(parents, ranks)
    by_level = np.argsort(facts.depth, kind="stable").astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(np.bincount(facts.depth))]).astype(np.int32)
    widest = int(np.diff(starts).max())
    arrays = []
    for successors, tags in levels:
        arrays.append(successors[:, None, :])
        if tags is not None:
            arrays.append(jax.lax.bitcast_convert_type(jnp.pad(tags, (0, -tags.shape[0] % TAGS)), jnp.int32))
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    tokens = pl.pallas_call(
        functools.partial(_kernel, orders=orders, length=O),
        out_shape=jax.ShapeDtypeStruct((A, n), jnp.int32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(A,),
            in_specs=[any_space] * len(arrays),
            out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
            scratch_shapes=[
                pltpu.SMEM((orders, widest, 1, levels[0][0].shape[1]), jnp.int32),
                pltpu.SMEM((max(orders - 1, 1), widest, TAGS), jnp.int32),
                pltpu.SMEM((n + 1, O), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        interpret=interpret,
        name="retrieval_lookup",
    )(context, *(jnp.asarray(x, jnp.int32) for x in (starts, by_level, parents, ranks)), *arrays)
    return jnp.maximum(tokens, 0), tokens != ABSENT


def _kernel(context_ref, starts_ref, order_ref, parents_ref, ranks_ref, *refs, orders: int, length: int):
    # context [A, O]; starts [D + 1], of the levels in order [n], nodes by depth; parents, ranks [n]
    tables, (tokens_ref, rows_ref, tags_ref, contexts_ref, semaphores) = refs[:-5], refs[-5:]
    a = pl.program_id(0)
    num_tokens = tables[-1].shape[0]
    for i in range(length):
        contexts_ref[0, i] = context_ref[a, i]

    def locate(node, order: int):
        """Row and tag of the last `order` tokens up to a node's parent, and whether they are known."""
        above = parents_ref[node]
        tokens = [contexts_ref[above, i] for i in range(length - order, length)]
        known = tokens[0] >= 0
        for token in tokens[1:]:
            known &= token >= 0
        if order == 1:
            known &= tokens[0] < num_tokens
            return jnp.where(known, tokens[0], 0), None, known
        row, tag = row_and_tag(tokens, tables[2 * (orders - order)].shape[0])
        return row, jax.lax.bitcast_convert_type(tag, jnp.int32), known

    def transfers(order: int, lane, row):
        level = 2 * (orders - order)
        yield pltpu.make_async_copy(tables[level].at[row], rows_ref.at[order - 1, lane], semaphores.at[0])
        if order > 1:
            block = pl.multiple_of(row // TAGS * TAGS, TAGS)
            yield pltpu.make_async_copy(
                tables[level + 1].at[pl.ds(block, TAGS)], tags_ref.at[order - 2, lane], semaphores.at[1]
            )

    def level(d, carry):
        first = starts_ref[d]

        def fetch(lane, carry):
            for order in range(1, orders + 1):
                row, _, _ = locate(order_ref[first + lane], order)
                for transfer in transfers(order, lane, row):
                    transfer.start()
            return carry

        def wait(lane, carry):
            for order in range(1, orders + 1):
                for transfer in transfers(order, lane, 0):
                    transfer.wait()
            return carry

        def choose(lane, carry):
            node = order_ref[first + lane]
            found = jnp.int32(ABSENT)
            for order in range(1, orders + 1):
                row, tag, known = locate(node, order)
                if order > 1:
                    known &= tags_ref[order - 2, lane, row % TAGS] == tag
                hit = known & (rows_ref[order - 1, lane, 0, 0] != ABSENT)
                found = jnp.where(hit, rows_ref[order - 1, lane, 0, ranks_ref[node]], found)
            found = jnp.where((found >= 0) & (found < num_tokens), found, ABSENT)
            above = parents_ref[node]
            for i in range(1, length):
                contexts_ref[node + 1, i - 1] = contexts_ref[above, i]
            contexts_ref[node + 1, length - 1] = found
            tokens_ref[a, node] = found
            return carry

        for step in (fetch, wait, choose):
            jax.lax.fori_loop(0, starts_ref[d + 1] - first, step, 0)
        return carry

    jax.lax.fori_loop(0, starts_ref.shape[0] - 1, level, 0)
