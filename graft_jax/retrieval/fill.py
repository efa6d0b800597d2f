"""Filling templates from a successor table, and the contexts that key it."""

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
    tokens: list[Array] = []
    order: list[int] = []  # template nodes in the order in which the levels fill them
    above, index_above = context[:, None, :], {0: 0}
    for level in template.levels:
        parent = np.array([index_above[template.parents[i - 1]] for i in level])
        rank = np.array([template.paths[i - 1][-1] for i in level])
        expanded = np.unique(parent)  # leaves need no lookup
        successors = table.lookup(levels, above[:, expanded])
        # A lookup with an absent token finds nothing, so what hangs below EMPTY is EMPTY.
        token = successors[:, np.searchsorted(expanded, parent), rank]
        above = jnp.concatenate([above[:, parent, 1:], token[:, :, None]], axis=2)
        index_above = {node: i for i, node in enumerate(level)}
        tokens.append(token)
        order += level
    filled = jnp.concatenate(tokens, axis=1)[:, np.argsort(order)]
    return jnp.maximum(filled, 0), filled != EMPTY


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
