"""Best-first trees: the most probable paths of a distribution over block continuations (DDTree, DominoTree).

DDTree's heap (arXiv 2604.12989) pops one node at a time. Scores never rise down a path, so the best N nodes
are found level by level instead: each level keeps its N best paths, scores all their children in one batch
and writes the best N of them to a ledger, whose N best entries are the tree. Both give the same nodes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.tree import structure
from graft_jax.tree.structure import Draft, DraftTree
from graft_jax.types import Array, Bool, Float, Int
from pallas_kernels.topk_rows.reference import topk_rows


@dataclasses.dataclass(frozen=True)
class BestFirst:
    """Sizes of a best-first tree.

    Attributes:
        depth: D, its deepest level.
        budget: nodes beside the root, and lanes of the frontier.
        children: C, scored successors of a node. More than `budget` are never needed.
    """

    depth: int
    budget: int
    children: int

    def __post_init__(self):
        if self.depth < 1 or self.budget < 1 or self.children < 1:
            raise ValueError(f"{self} needs depth, budget and children of at least 1")


class Lanes(flax.struct.PyTreeNode):
    """One level of the frontier, best first.

    Attributes:
        tokens: of the nodes.
        scores: cumulative log-probabilities; -inf where a lane is empty.
        came_from: the lane of the level before that each descends from.
        line: rank of the node's path among the level's lanes, in order of its tokens.
    """

    tokens: Int[Array, "B W"]
    scores: Float[Array, "B W"]
    came_from: Int[Array, "B W"]
    line: Int[Array, "B W"]


class Ledger(flax.struct.PyTreeNode):
    """The lanes of all levels: of equal scores the one that ranks higher stands first."""

    tokens: Int[Array, "B D W"]
    scores: Float[Array, "B D W"]
    came_from: Int[Array, "B D W"]


# Given the carry, the depth of the lanes' nodes (traced, from 1) and the lanes: children of each lane, all
# different, and their log-probabilities (-inf where there is none), and the carry.
Expand = Callable[[Any, Array, Lanes], tuple[Int[Array, "B W C"], Float[Array, "B W C"], Any]]


def grow(
    sizes: BestFirst,
    root: Int[Array, "B"],
    tokens: Int[Array, "B C"],
    log_probs: Float[Array, "B C"],
    expand: Expand,
    carry: Any,
    active: Bool[Array, "B"],
) -> Draft:
    """The `budget` most probable paths below `root`.

    Expansion stops where the best live lane is no better than the `budget`-th best entry so far: its children
    score no higher and lie deeper, so none of them can enter.

    Args:
        tokens, log_probs: the root's successors, all different.
        expand: scores the children of one level.
        carry: passed through `expand`.
        active: rows that want a tree; others get the root alone.

    Returns:
        The draft, nodes by score, then depth, then path; `forwards` counts a row's expansions and
        `confidence` holds the probability of each level's best path.
    """
    W, D, B = sizes.budget, sizes.depth, root.shape[0]

    def record(ledger: Ledger, best, alive, confidence, depth, lanes: Lanes):
        """Enters the level at `depth` (from 0), and says which rows go on."""
        ledger = Ledger(**{
            name: jax.lax.dynamic_update_slice_in_dim(getattr(ledger, name), getattr(lanes, name)[:, None], depth, 1)
            for name in ("tokens", "scores", "came_from")
        })  # fmt: skip
        best, _ = topk_rows(jnp.concatenate([best, lanes.scores], axis=1), W)
        seen = jnp.where(alive, jnp.exp(lanes.scores[:, 0]), jnp.nan)
        confidence = jax.lax.dynamic_update_slice(confidence, seen[:, None], (0, depth))
        return ledger, best, alive & (lanes.scores[:, 0] > best[:, -1]), confidence

    def step(state):
        depth, lanes, ledger, best, alive, confidence, forwards, carry = state
        children, log_probs, carry = expand(carry, depth, lanes)
        scores = lanes.scores[:, :, None] + jnp.minimum(log_probs, 0.0)
        scores = jnp.where(alive[:, None, None], scores, -jnp.inf)
        lanes = _select(children, scores, lanes.line, W)
        forwards = forwards + alive.astype(jnp.int32)
        ledger, best, alive, confidence = record(ledger, best, alive, confidence, depth, lanes)
        return depth + 1, lanes, ledger, best, alive, confidence, forwards, carry

    scores = jnp.where(active[:, None], jnp.minimum(log_probs, 0.0) + 0.0, -jnp.inf)
    lanes = _select(tokens[:, None], scores[:, None], jnp.zeros((B, 1), jnp.int32), W)
    zero, empty = jnp.zeros((B, D, W), jnp.int32), jnp.full((B, D, W), -jnp.inf)
    start = record(
        Ledger(zero, empty, zero), jnp.full((B, W), -jnp.inf), active, jnp.full((B, D), jnp.nan), jnp.int32(0), lanes
    )
    state = (jnp.int32(1), lanes, *start, jnp.zeros(B, jnp.int32), carry)
    if D > 1:
        state = jax.lax.while_loop(lambda s: (s[0] < D) & s[4].any(), step, state)
    _, _, ledger, _, _, confidence, forwards, _ = state
    return Draft(_tree(ledger, root), jnp.zeros(B, jnp.int32), confidence, forwards)


def _select(tokens: Int[Array, "B V C"], scores: Float[Array, "B V C"], line: Int[Array, "B V"], W: int) -> Lanes:
    """The W best children of V lanes, by score, then path; V * C may be less than W."""
    B, V, C = tokens.shape
    missing = max(0, W - V * C)

    def flat(x: Array, filler) -> Array:
        return jnp.pad(x.reshape(B, V * C), ((0, 0), (0, missing)), constant_values=filler)

    came_from = flat(jnp.broadcast_to(jnp.arange(V)[None, :, None], (B, V, C)), 0)
    lines = flat(jnp.broadcast_to(line[:, :, None], (B, V, C)), V)
    operands = (-flat(scores, -jnp.inf), lines, flat(tokens, 0), came_from)
    falling, lines, tokens, came_from = (x[:, :W] for x in jax.lax.sort(operands, num_keys=3))
    return Lanes(tokens, -falling, came_from, structure.path_ranks(lines, tokens))


def _tree(ledger: Ledger, root: Int[Array, "B"]) -> DraftTree:
    """The best entries of the ledger as a tree; each level has as many lanes as the tree has nodes."""
    B, D, W = ledger.tokens.shape
    scores, index = topk_rows(ledger.scores.reshape(B, D * W), W)
    place = jnp.zeros((B, D * W), jnp.int32).at[jnp.arange(B)[:, None], index].set(1 + jnp.arange(W)[None, :])
    level = index // W
    came_from = jnp.take_along_axis(ledger.came_from.reshape(B, D * W), index, axis=1)
    above = jnp.take_along_axis(place, jnp.maximum((level - 1) * W + came_from, 0), axis=1)
    tokens = jnp.take_along_axis(ledger.tokens.reshape(B, D * W), index, axis=1)
    return structure.drafted(root, tokens, jnp.where(level > 0, above, 0), level + 1, scores)
