"""EAGLE's dynamic tree: a beam of the best paths, a pool of all scored nodes, and a rerank of the pool.

EAGLE-2 and EAGLE-3 (`topK_genrate` of the reference): the first level is the top k of the root's
distribution; each of `depth` expansions runs the k best nodes of the last level and scores their top k
children; the tree is the best `total` nodes of the pool. No node scores above its parent and ties go to the
shallower one, so the tree is closed under parents.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.tree import structure
from graft_jax.tree.gates import Gates
from graft_jax.tree.structure import Draft, DraftTree
from graft_jax.types import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Beam:
    """Sizes of the dynamic tree.

    Attributes:
        depth: expansions of the first level; the tree has up to depth + 1 levels.
        top_k: k, lanes of the beam and children of a node.
        total: nodes that are kept beside the root (the reference's `total_token` counts the root too).
    """

    depth: int
    top_k: int
    total: int

    def __post_init__(self):
        if self.depth < 0 or self.top_k < 1 or self.total < 1:
            raise ValueError(f"{self} needs depth of at least 0, top_k and total of at least 1")
        if self.total > self.pool_size:
            raise ValueError(
                f"budget={self.total} is more than the {self.pool_size} nodes that depth={self.depth} and "
                f"top_k={self.top_k} score"
            )

    @property
    def pool_size(self) -> int:
        return self.top_k + self.depth * self.top_k**2

    @property
    def max_depth(self) -> int:
        return self.depth + 1


class Lanes(flax.struct.PyTreeNode):
    """One level of the beam, best first.

    Attributes:
        tokens: of the nodes to run.
        scores: cumulative log-probabilities; -inf where a lane is empty.
        nodes: their places in the pool.
        came_from: the lane of the level before that each descends from.
        mask: which rows run so far (W a level) are the node itself or its ancestors.
        line: rank of the node's path among the level's lanes, in order of its tokens.
    """

    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]
    nodes: Int[Array, "B W"]
    came_from: Int[Array, "B W"]
    mask: Bool[Array, "B W R"]
    line: Int[Array, "B W"]


class Pool(flax.struct.PyTreeNode):
    """All scored nodes. `line` is the parent's rank: with the token it orders the paths of one depth."""

    tokens: Int[Array, "B Q"]
    scores: Float[Array, "B Q"]
    parents: Int[Array, "B Q"]
    line: Int[Array, "B Q"]


# Given the carry, the level's number from 0 (traced) and its lanes: top children of each lane, their
# log-probabilities, best first, and the carry.
Expand = Callable[[Any, Array, Lanes], tuple[Int[Array, "B W C"], Float[Array, "B W C"], Any]]


def grow(
    beam: Beam,
    gates: Gates,
    thresholds: Float[Array, "n"],
    root: Int[Array, "B"],
    tokens: Int[Array, "B W"],
    log_probs: Float[Array, "B W"],
    expand: Expand,
    carry: Any,
    active: Bool[Array, "B"],
) -> Draft:
    """Drafts a tree below `root`, and stops, row by row, where a gate closes.

    Args:
        thresholds: one a gate; a value of `gates.OPEN` never closes it.
        tokens, log_probs: the root's top k successors, best first.
        expand: runs one level; it is not called any more when no row goes on.
        carry: passed through `expand`.
        active: rows that want a tree; others get the root alone.

    Returns:
        The draft; `forwards` counts a row's expansions, `confidence` holds [B, depth + 1].
    """
    W, D = beam.top_k, beam.depth
    B = root.shape[0]
    level_of = jnp.concatenate([jnp.zeros(W, jnp.int32), 1 + jnp.arange(D * W * W, dtype=jnp.int32) // (W * W)])

    def extend(pool: Pool, start, **new: Array) -> Pool:
        """Writes a level's nodes; rows that stopped keep their pool."""
        return pool.replace(
            **{k: jax.lax.dynamic_update_slice(getattr(pool, k), v, (0, start)) for k, v in new.items()}
        )

    def settle(depth, lanes: Lanes, alive, stage, confidence):
        """Looks at the gates with the level that `depth` expansions made."""
        seen = jnp.where(alive, gates.confidence(lanes.scores), jnp.nan)
        confidence = jax.lax.dynamic_update_slice(confidence, seen[:, None], (0, depth))
        closed = alive & gates.closes(depth, seen, thresholds)
        return alive & ~closed, gates.stage(closed, depth, stage), confidence

    def step(state):
        depth, lanes, pool, alive, stage, confidence, forwards, carry = state
        own = jnp.arange(D * W)[None, :] == depth * W + jnp.arange(W)[:, None]
        lanes = lanes.replace(mask=lanes.mask | own[None])
        children, log_probs, carry = expand(carry, depth, lanes)
        scores = lanes.scores[:, :, None] + jnp.minimum(log_probs, 0.0)
        scores = jnp.where(alive[:, None, None], scores, -jnp.inf).reshape(B, W * W)
        children = children.reshape(B, W * W)
        start = W + depth * W * W
        line = jnp.repeat(lanes.line, W, axis=1)
        parents = jnp.repeat(lanes.nodes, W, axis=1)
        pool = extend(pool, start, tokens=children, scores=scores, parents=parents, line=line)
        lanes = _best(lanes, children, scores, line, start, W)
        forwards = forwards + alive.astype(jnp.int32)
        alive, stage, confidence = settle(depth + 1, lanes, alive, stage, confidence)
        return depth + 1, lanes, pool, alive, stage, confidence, forwards, carry

    scores = jnp.where(active[:, None], jnp.minimum(log_probs, 0.0), -jnp.inf)
    lane = jnp.broadcast_to(jnp.arange(W)[None, :], (B, W))
    lanes = Lanes(
        tokens, scores, lane, lane, jnp.zeros((B, W, D * W), bool), structure.path_ranks(jnp.zeros_like(lane), tokens)
    )
    Q, zero = beam.pool_size, jnp.zeros(B, jnp.int32)
    empty = jnp.zeros((B, Q), jnp.int32)
    pool = Pool(empty, jnp.full((B, Q), -jnp.inf), empty - 1, empty)
    pool = extend(pool, 0, tokens=tokens, scores=scores)
    confidence = jnp.full((B, D + 1), jnp.nan)
    alive, stage, confidence = settle(jnp.int32(0), lanes, active, zero, confidence)
    state = (jnp.int32(0), lanes, pool, alive, stage, confidence, zero, carry)
    if D:
        state = jax.lax.while_loop(lambda s: (s[0] < D) & s[3].any(), step, state)
    _, _, pool, _, stage, confidence, forwards, _ = state
    return Draft(_rerank(pool, level_of, root, beam.total), stage, confidence, forwards)


def _best(lanes: Lanes, tokens, scores, line, start, W: int) -> Lanes:
    """The W best of a level's candidates, with what they inherit."""
    index = jnp.broadcast_to(jnp.arange(W * W)[None, :], tokens.shape)
    _, line, tokens, scores, index = (
        x[:, :W] for x in jax.lax.sort((-scores, line, tokens, scores, index), num_keys=3)
    )
    came_from = index // W
    mask = jnp.take_along_axis(lanes.mask, came_from[:, :, None], axis=1)
    return Lanes(tokens, scores, start + index, came_from, mask, structure.path_ranks(line, tokens))


def _rerank(pool: Pool, level_of: Int[Array, "Q"], root: Int[Array, "B"], total: int) -> DraftTree:
    """The best nodes of the pool: by score, then depth, then path."""
    B, Q = pool.tokens.shape
    levels = jnp.broadcast_to(level_of[None, :], (B, Q))
    index = jnp.broadcast_to(jnp.arange(Q)[None, :], (B, Q))
    operands = (-pool.scores, levels, pool.line, pool.tokens, index)
    falling, levels, _, tokens, index = (x[:, :total] for x in jax.lax.sort(operands, num_keys=4))
    rows = jnp.arange(B)[:, None]
    place = jnp.zeros((B, Q), jnp.int32).at[rows, index].set(1 + jnp.arange(total)[None, :])
    above = jnp.take_along_axis(pool.parents, index, axis=1)
    parents = jnp.where(above < 0, 0, jnp.take_along_axis(place, jnp.maximum(above, 0), axis=1))
    return structure.drafted(root, tokens, parents, levels + 1, -falling)
