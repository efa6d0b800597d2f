"""Filling templates from a successor table, and the contexts that key it."""

import jax.numpy as jnp

from graft_jax.retrieval.adjacency import EMPTY, Level, SuccessorTable
from graft_jax.tree.structure import DraftTree
from graft_jax.tree.templates import Template
from graft_jax.types import Array, Bool, Int
from pallas_kernels import retrieval_lookup


def fill_template(
    template: Template, table: SuccessorTable, levels: tuple[Level, ...], context: Int[Array, "A O"]
) -> tuple[Int[Array, "A n"], Bool[Array, "A n"]]:
    """The template's tokens under each context, one dependent lookup a depth (`pallas_kernels.retrieval_lookup`).

    Args:
        context: the tokens up to and including the node that the template hangs from, oldest first.

    Returns:
        Tokens and validity of the template's n nodes; below an unknown context nothing is valid, and
        invalid tokens are 0.
    """
    return retrieval_lookup(
        table.pairs(levels), context, template.parents, template.ranks, implementation=table.kernels
    )


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
