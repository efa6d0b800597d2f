"""The draft tree: one frozen dataclass of `[B, N]` arrays, and what follows from its parents."""

from typing import ClassVar

import flax.struct
import jax.numpy as jnp

from graft_jax.types import Array, Bool, Float, Int

# Where a node came from; acceptance is reported by source.
ROOT, DRAFTED, RETRIEVED = 0, 1, 2
NUM_SOURCES = 3


class DraftTree(flax.struct.PyTreeNode):
    """A batch of token trees of capacity N.

    Node 0 is the root, the last committed token, and is always valid. Nodes stand in order of priority:
    every prefix of the valid nodes is itself a tree, so a smaller budget is a shorter prefix.

    Attributes:
        tokens: token ids; those of invalid nodes are inside the vocabulary and mean nothing.
        parents: index of the parent, `parents[i] < i`; the root's is `NO_PARENT`.
        depth: root 0.
        score: cumulative draft log-probability of the path; -inf for RETRIEVED nodes.
        source: ROOT, DRAFTED or RETRIEVED.
        valid: closed under parents.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    score: Float[Array, "B N"]
    source: Int[Array, "B N"]
    valid: Bool[Array, "B N"]

    NO_PARENT: ClassVar[int] = -1

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def capacity(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]


class Draft(flax.struct.PyTreeNode):
    """A proposal.

    Attributes:
        tree: of capacity K + 1, nodes in order of priority.
        stage: which of the drafter's stages each row ended in; 0 where there is one.
        confidence: what the gates saw at each depth; NaN where nothing was drafted.
        forwards: drafter forward passes that the row needed.
    """

    tree: DraftTree
    stage: Int[Array, "B"]
    confidence: Float[Array, "B D"]
    forwards: Int[Array, "B"]


def drafted(
    root: Int[Array, "B"],
    tokens: Int[Array, "B K"],
    parents: Int[Array, "B K"],
    depth: Int[Array, "B K"],
    score: Float[Array, "B K"],
) -> DraftTree:
    """A root and drafted nodes in order of priority; a score of -inf marks those that are none.

    Args:
        parents: as in the tree: 0 is the root, the first drafted node 1.
    """
    B, valid = root.shape[0], score > -jnp.inf

    def rooted(at_root, x: Array) -> Array:
        return jnp.concatenate([jnp.broadcast_to(at_root, (B, 1)).astype(x.dtype), x], axis=1)

    return DraftTree(
        tokens=rooted(root[:, None], jnp.where(valid, tokens, 0)),
        parents=rooted(jnp.int32(DraftTree.NO_PARENT), jnp.where(valid, parents, 0)),
        depth=rooted(jnp.int32(0), jnp.where(valid, depth, 1)),
        score=rooted(jnp.float32(0), score),
        source=rooted(jnp.int32(ROOT), jnp.full_like(tokens, DRAFTED)),
        valid=rooted(jnp.bool_(True), valid),
    )


def path_ranks(line: Int[Array, "B W"], tokens: Int[Array, "B W"]) -> Int[Array, "B W"]:
    """Rank of every lane's path among its level's, in order of (its parent's rank, its token)."""
    before = line[:, None, :] < line[:, :, None]
    before |= (line[:, None, :] == line[:, :, None]) & (tokens[:, None, :] < tokens[:, :, None])
    return before.sum(axis=2, dtype=jnp.int32)


def root_only(root: Int[Array, "B"]) -> DraftTree:
    """The tree that is only its root: plain decoding."""
    column = root[:, None].astype(jnp.int32)
    return DraftTree(
        tokens=column,
        parents=jnp.full_like(column, DraftTree.NO_PARENT),
        depth=jnp.zeros_like(column),
        score=jnp.zeros(column.shape, jnp.float32),
        source=jnp.full_like(column, ROOT),
        valid=jnp.ones(column.shape, bool),
    )


def chain(root: Int[Array, "B"], tokens: Int[Array, "B K"], count: Int[Array, "B"]) -> DraftTree:
    """A tree without branches: `tokens` below the root, of which the first `count` are valid."""
    B, K = tokens.shape
    index = jnp.broadcast_to(jnp.arange(K + 1)[None, :], (B, K + 1))
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], tokens], axis=1).astype(jnp.int32),
        parents=index - 1,
        depth=index,
        score=jnp.zeros((B, K + 1), jnp.float32),
        source=jnp.where(index == 0, ROOT, DRAFTED),
        valid=index <= count[:, None],
    )


def truncate(tree: DraftTree, budget: Int[Array, "B"]) -> DraftTree:
    """Keeps the root and the first `budget` other nodes of each row: a mask, no new shape."""
    keep = jnp.arange(tree.capacity)[None, :] <= budget[:, None]
    return tree.replace(valid=tree.valid & keep)


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """`mask[b, i, j]`: j is i or an ancestor of i.

    For parents [-1, 0, 0, 1] (node 3 under node 1):

        1 . . .
        1 1 . .
        1 . 1 .
        1 1 . 1

    Args:
        parents: -1 for the root.
        max_depth: no node lies deeper.
    """
    N = parents.shape[1]
    step = (parents[:, :, None] == jnp.arange(N)[None, None, :]).astype(jnp.float32)
    mask = step + jnp.eye(N, dtype=jnp.float32)[None]  # ancestors at distance 0 and 1
    reach = 1
    while reach < max_depth:  # doubling: paths of twice the length in one small product
        mask = jnp.minimum(jnp.einsum("bij,bjk->bik", mask, mask), 1.0)
        reach *= 2
    return mask > 0.5
