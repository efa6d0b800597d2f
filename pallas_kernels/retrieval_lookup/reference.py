"""A template's tokens from the successor table, in plain JAX: one dependent lookup a level."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.retrieval_lookup.hashing import row_and_tag
from pallas_kernels.retrieval_lookup.template import plan

ABSENT = -1  # no token


def locate(context: jax.Array, order: int, num_rows: int) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Row, tag, and whether the context is known at all, of the last `order` tokens of int32 [..., O]."""
    tokens = [context[..., i] for i in range(context.shape[-1] - order, context.shape[-1])]
    if order == 1:
        known = (tokens[0] >= 0) & (tokens[0] < num_rows)
        return jnp.where(known, tokens[0], 0), None, known
    row, tag = row_and_tag(tokens, num_rows)
    known = tokens[0] >= 0
    for token in tokens[1:]:
        known &= token >= 0
    return row, tag, known


def lookup(levels: Sequence[tuple[jax.Array, jax.Array | None]], context: jax.Array) -> jax.Array:
    """Successors, best first, of the longest known suffix of each context; absent where none is.

    Args:
        levels: successors int32 [R, C] and tags uint32 [R], longest context first; the last has no tags.
        context: int32 [..., O], oldest first; absent where there are fewer.
    """
    found = jnp.full((*context.shape[:-1], levels[0][0].shape[1]), ABSENT, jnp.int32)
    for order, (table, tags) in zip(range(1, len(levels) + 1), reversed(levels)):  # the longest one wins
        row, tag, known = locate(context, order, table.shape[0])
        successors = table[row]
        hit = known & (successors[..., 0] != ABSENT)
        if tags is not None:
            hit &= tags[row] == tag
        found = jnp.where(hit[..., None], successors, found)
    return found


def retrieval_lookup(
    levels: Sequence[tuple[jax.Array, jax.Array | None]],
    context: jax.Array,
    *,
    parents: tuple[int, ...],
    ranks: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """See `api.retrieval_lookup`."""
    # Levels are padded to one width and scanned: one lookup to compile, whatever the template's depth.
    facts = plan(parents, ranks)
    num_tokens = levels[-1][0].shape[0]

    def fill_level(above: jax.Array, static):
        parent, rank = static  # above: [A, L, O]
        contexts = above[:, parent]
        # A lookup with an absent token finds nothing, so what hangs below an absent one is absent.
        successors = lookup(levels, contexts)
        token = jnp.take_along_axis(successors, rank[None, :, None], axis=2)
        token = jnp.where((token >= 0) & (token < num_tokens), token, ABSENT)
        return jnp.concatenate([contexts[:, :, 1:], token], axis=2), token[:, :, 0]

    start = jnp.repeat(context[:, None, :], facts.rank.shape[1], axis=1)
    _, filled = jax.lax.scan(fill_level, start, (jnp.asarray(facts.parent_lane), jnp.asarray(facts.rank)))
    tokens = filled[facts.place[:, 0], :, facts.place[:, 1]].T
    return jnp.maximum(tokens, 0), tokens != ABSENT
