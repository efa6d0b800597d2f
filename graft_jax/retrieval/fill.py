"""Filling templates from a successor table, and the contexts that key it."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.retrieval.adjacency import EMPTY, Level, SuccessorTable
from graft_jax.tree.structure import DraftTree
from graft_jax.tree.templates import Template
from graft_jax.types import Array, Bool, Int


def fill_template(
    template: Template, table: SuccessorTable, levels: tuple[Level, ...], context: Int[Array, "A O"]
) -> tuple[Int[Array, "A n"], Bool[Array, "A n"]]:
    """The template's tokens under each context, one dependent lookup a depth.

    Args:
        context: the tokens up to and including the node that the template hangs from, oldest first.

    Returns:
        Tokens and validity of the template's n nodes; below an unknown context nothing is valid, and
        invalid tokens are 0.
    """
    # Levels are padded to one width and scanned: one lookup to compile, whatever the template's depth.
    if not len(template):
        return jnp.zeros((context.shape[0], 0), jnp.int32), jnp.zeros((context.shape[0], 0), bool)
    depth, width = len(template.levels), max(map(len, template.levels))
    parent, rank = np.zeros((2, depth, width), np.int32)
    place = np.zeros((len(template), 2), np.int32)  # level and lane of each node
    lane_above = {0: 0}
    for d, level in enumerate(template.levels):
        for lane, i in enumerate(level):
            parent[d, lane] = lane_above[template.parents[i - 1]]
            rank[d, lane] = template.paths[i - 1][-1]
            place[i - 1] = d, lane
        lane_above = {i: lane for lane, i in enumerate(level)}

    def fill_level(above: Int[Array, "A W O"], static):
        parent, rank = static
        contexts = above[:, parent]
        # A lookup with an absent token finds nothing, so what hangs below EMPTY is EMPTY.
        successors = table.lookup(levels, contexts)
        token = jnp.take_along_axis(successors, rank[None, :, None], axis=2)
        return jnp.concatenate([contexts[:, :, 1:], token], axis=2), token[:, :, 0]

    start = jnp.repeat(context[:, None, :], width, axis=1)
    _, filled = jax.lax.scan(fill_level, start, (jnp.asarray(parent), jnp.asarray(rank)))
    tokens = filled[place[:, 0], :, place[:, 1]].T
    return jnp.maximum(tokens, 0), tokens != EMPTY


def node_paths(tree: DraftTree, max_depth: int) -> Int[Array, "B N D"]:
    """The tokens from below the root down to each node; EMPTY behind its depth."""
    B, N = tree.tokens.shape
    column = jnp.arange(max_depth)[None, None, :]
    paths = jnp.full((B, N, max_depth), EMPTY, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(N)[None, :], (B, N))
    for _ in range(max_depth):
        token = jnp.take_along_axis(tree.tokens, at, axis=1)
        depth = jnp.take_along_axis(tree.depth, at, axis=1)
        paths = jnp.where(column == depth[:, :, None] - 1, token[:, :, None], paths)
        at = jnp.maximum(jnp.take_along_axis(tree.parents, at, axis=1), 0)
    return paths


def node_contexts(tree: DraftTree, history: Int[Array, "B h"]) -> Int[Array, "B N O"]:
    """The last O = h + 1 tokens up to each node, along its path and then into the history.

    Args:
        history: the h tokens before the root, oldest first; EMPTY where there are fewer.
    """
    h = history.shape[1]
    # The history becomes a chain above the root: entry i's parent is i - 1.
    tokens = jnp.concatenate([history, tree.tokens], axis=1)
    parents = jnp.concatenate([jnp.zeros_like(history) + jnp.arange(h)[None, :] - 1, tree.parents + h], axis=1)
    at = jnp.arange(tree.capacity)[None, :] + h + jnp.zeros_like(tree.tokens)
    context = []
    for _ in range(h + 1):
        context.append(jnp.take_along_axis(tokens, at, axis=1))
        at = jnp.maximum(jnp.take_along_axis(parents, at, axis=1), 0)
    return jnp.stack(context[::-1], axis=-1)


def sequence_contexts(tokens: Int[Array, "B T"], history: Int[Array, "B h"]) -> Int[Array, "B T O"]:
    """The last O = h + 1 tokens up to each position of consecutive tokens."""
    h, T = history.shape[1], tokens.shape[1]
    line = jnp.concatenate([history, tokens], axis=1)
    return jnp.stack([line[:, i : i + T] for i in range(h + 1)], axis=-1)


def advance(history: Int[Array, "B h"], tokens: Int[Array, "B T"], count: Int[Array, "B"]):
    """The history after the first `count` of `tokens`."""
    h = history.shape[1]
    line = jnp.concatenate([history, tokens], axis=1)
    return jnp.take_along_axis(line, count[:, None] + jnp.arange(h)[None, :], axis=1)
