"""Merging a drafted tree with retrieved nodes under one budget (Graft, section 3.2)."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.tree.structure import RETRIEVED, DraftTree
from graft_jax.tree.templates import Template
from graft_jax.types import Array, Bool, Int

UNWANTED = 2**30  # priority of a candidate that must not be taken


def merge(
    base: DraftTree,
    template: Template,
    points: Int[Array, "B A"],
    point_valid: Bool[Array, "B A"],
    tokens: Int[Array, "B A n"],
    valid: Bool[Array, "B A n"],
    priority: Int[Array, "B Q"],
    capacity: int,
) -> DraftTree:
    """The `capacity` best candidates of a base tree and of retrieved copies of a template.

    Candidates are the base's nodes and, below each attachment point, the template's. A retrieved node that
    repeats a sibling (same parent, same token) merges with it and lends it its priority, so its slot goes
    to the next candidate.

    Args:
        base: the drafted tree.
        template: n nodes.
        points: base nodes that copies of the template hang from.
        tokens, valid: the retrieved nodes of each copy.
        priority: of all Q = Nb + A * n candidates, base first; lower is better; the root's is lowest;
            no candidate's is lower than its parent's; `UNWANTED` leaves one out.
        capacity: K.

    Returns:
        A tree of K + 1 nodes in order of priority; fewer are valid only when the candidates run out.
    """
    B, Nb = base.tokens.shape
    A, n = tokens.shape[1:]
    rows = jnp.arange(B)[:, None]
    token = jnp.concatenate([base.tokens, tokens.reshape(B, A * n)], axis=1)
    alive = jnp.concatenate([base.valid, (valid & point_valid[:, :, None]).reshape(B, A * n)], axis=1)
    parent = jnp.concatenate([base.parents, jnp.zeros((B, A * n), jnp.int32)], axis=1)
    depth = jnp.concatenate([base.depth, jnp.zeros((B, A * n), jnp.int32)], axis=1)
    stands_for = jnp.arange(Nb + A * n)[None, :] + jnp.zeros((B, 1), jnp.int32)

    # Level by level, so that a node's parent already stands for what it merged with.
    for level in template.levels:
        at = np.array([[Nb + a * n + i - 1 for i in level] for a in range(A)]).reshape(-1)
        above = np.array([[Nb + a * n + template.parents[i - 1] - 1 for i in level] for a in range(A)])
        if template.parents[level[0] - 1] == 0:
            parents = jnp.repeat(points, len(level), axis=1)
        else:
            parents = stands_for[:, above.reshape(-1)]
        parent = parent.at[:, at].set(parents)
        depth = depth.at[:, at].set(depth[rows, parents] + 1)
        alive = alive.at[:, at].set(alive[:, at] & alive[rows, parents])
        # Siblings that may be the same node: the base's, and earlier ones of this level.
        known = np.concatenate([np.arange(Nb), at])
        same = (parent[:, None, known] == parent[:, at, None]) & (token[:, None, known] == token[:, at, None])
        same &= alive[:, None, known] & (jnp.asarray(known)[None, None, :] < jnp.asarray(at)[None, :, None])
        twin = jnp.asarray(known)[jnp.argmax(same, axis=2)]
        merged = same.any(axis=2) & alive[:, at]
        stands_for = stands_for.at[:, at].set(jnp.where(merged, twin, stands_for[:, at]))

    priority = jnp.where(alive, priority, UNWANTED)
    priority = jnp.full_like(priority, UNWANTED).at[rows, stands_for].min(priority)
    order = jnp.arange(Nb + A * n)[None, :] + jnp.zeros((B, 1), jnp.int32)
    priority, order = jax.lax.sort((priority, order), num_keys=1)
    short = capacity + 1 - order.shape[1]
    if short > 0:
        priority = jnp.pad(priority, ((0, 0), (0, short)), constant_values=UNWANTED)
        order = jnp.pad(order, ((0, 0), (0, short)))
    chosen, wanted = order[:, : capacity + 1], priority[:, : capacity + 1] < UNWANTED

    new_index = jnp.zeros_like(stands_for)
    columns = jnp.arange(capacity + 1)[None, :] + jnp.zeros((B, 1), jnp.int32)
    new_index = new_index.at[rows, jnp.where(wanted, chosen, Nb + A * n)].set(columns, mode="drop")

    def pick(x: Array) -> Array:
        return jnp.take_along_axis(x, chosen, axis=1)

    is_root = columns == 0
    retrieved = chosen >= Nb
    parents = jnp.take_along_axis(new_index, jnp.maximum(pick(parent), 0), axis=1)
    base_at = jnp.minimum(chosen, Nb - 1)
    return DraftTree(
        tokens=pick(token),
        parents=jnp.where(is_root, DraftTree.NO_PARENT, jnp.where(wanted, parents, 0)),
        depth=jnp.where(wanted, pick(depth), 1),
        score=jnp.where(retrieved, -jnp.inf, jnp.take_along_axis(base.score, base_at, axis=1)),
        source=jnp.where(retrieved, RETRIEVED, jnp.take_along_axis(base.source, base_at, axis=1)),
        valid=wanted,
    )
