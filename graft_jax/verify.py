"""Acceptance: choose, then match, level by level from the root."""

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.sampling import Sampling, choose
from graft_jax.tree.structure import DraftTree
from graft_jax.types import Array, Bool, Float, Int


class Verdict(flax.struct.PyTreeNode):
    """What the target said of a tree.

    Attributes:
        path: nodes from the root along the accepted path; entries behind `num_accepted` are 0.
        num_accepted: accepted nodes, the root not counted.
        tokens: the tokens to emit, accepted ones and then the bonus; entries behind `count` are 0.
        count: `num_accepted + 1`.
        bonus: the target's own token after the path, the next round's root.
        active: rows that took part; those of others are left alone by everyone.
    """

    path: Int[Array, "B P"]  # P = D + 1
    num_accepted: Int[Array, "B"]
    tokens: Int[Array, "B P"]
    count: Int[Array, "B"]
    bonus: Int[Array, "B"]
    active: Bool[Array, "B"]


def accept(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    sampling: Sampling,
    position: Int[Array, "B"],
    active: Bool[Array, "B"],
    max_depth: int,
) -> Verdict:
    """Walks down the tree along the tokens that the target chooses itself.

    At each node the target's token for the next position is chosen as in plain decoding; the walk moves
    to the child that carries it and stops where none does. The emitted tokens are therefore plain
    decoding's for any tree, at every temperature. Only the rows on the path are processed.

    Args:
        tree: the drafted tree.
        logits: the target's float32 logits at every node; rows of invalid nodes are never read.
        position: absolute position of the root.
        max_depth: D, static; no valid node lies deeper.
    """
    B, P = tree.batch, max_depth + 1
    rows = jnp.arange(B)
    column = jnp.arange(P)[None, :]

    def step(carry):
        depth, node, walking, path, tokens, accepted, bonus = carry
        token = choose(logits[rows, node], sampling, position + depth + 1)
        matches = tree.valid & (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
        child = jnp.argmax(matches, axis=1).astype(jnp.int32)
        found = walking & matches.any(axis=1) & (depth < max_depth)
        tokens = jnp.where(walking[:, None] & (column == depth), token[:, None], tokens)
        bonus = jnp.where(walking, token, bonus)
        node = jnp.where(found, child, node)
        path = jnp.where(found[:, None] & (column == depth + 1), node[:, None], path)
        return depth + 1, node, found, path, tokens, accepted + found.astype(jnp.int32), bonus

    zero, grid = jnp.zeros(B, jnp.int32), jnp.zeros((B, P), jnp.int32)
    start = (jnp.int32(0), zero, active, grid, grid, zero, zero)
    _, _, _, path, tokens, accepted, bonus = jax.lax.while_loop(lambda c: c[2].any(), step, start)
    return Verdict(path=path, num_accepted=accepted, tokens=tokens, count=accepted + 1, bonus=bonus, active=active)
