"""Merging a drafted tree with retrieved nodes under one budget (Graft, section 3.2)."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.tree.structure import RETRIEVED, DraftTree
from graft_jax.tree.templates import Template
from graft_jax.types import Array, Bool, Int

NO_TOKEN = -1
UNWANTED = 2**30  # priority of a candidate that must not be taken


def merge(
    base: DraftTree,
    base_paths: Int[Array, "B Nb Db"],
    template: Template,
    points: Int[Array, "B A"],
    point_valid: Bool[Array, "B A"],
    tokens: Int[Array, "B A n"],
    valid: Bool[Array, "B A n"],
    priority: Int[Array, "B Q"],
    capacity: int,
) -> DraftTree:
    """The `capacity` best candidates of a base tree and of retrieved copies of a template.

    Candidates are the base's nodes and, below each attachment point, the template's. A retrieved node with
    the same tokens from the root as an earlier candidate merges with it and lends it its priority, so its
    slot goes to the next candidate.

    Args:
        base: the drafted tree.
        base_paths: the tokens from below the root down to each base node; behind its depth, none.
        template: n nodes.
        points: base nodes that copies of the template hang from.
        tokens, valid: the retrieved nodes of each copy; validity is closed under the template's parents.
        priority: of all Q = Nb + A * n candidates, base first; lower is better; the root's is lowest;
            no candidate's is lower than its parent's; `UNWANTED` leaves one out.
        capacity: K.

    Returns:
        A tree of K + 1 nodes in order of priority; fewer are valid only when the candidates run out.
    """
    B, Nb = base.tokens.shape
    A, n = tokens.shape[1:]
    Q = Nb + A * n
    rows = jnp.arange(B)[:, None]
    token = jnp.concatenate([base.tokens, tokens.reshape(B, A * n)], axis=1)
    alive = jnp.concatenate([base.valid, (valid & point_valid[:, :, None]).reshape(B, A * n)], axis=1)
    paths = jnp.concatenate(
        [
            jnp.pad(base_paths, ((0, 0), (0, 0), (0, template.max_depth)), constant_values=NO_TOKEN),
            _retrieved_paths(base, base_paths, template, points, tokens).reshape(B, A * n, -1),
        ],
        axis=1,
    )
    depth = (paths != NO_TOKEN).sum(axis=2, dtype=jnp.int32)
    # A template node's parent is its point, or the template's parent in the same copy.
    above = np.array([[Nb + a * n + p - 1 for p in template.parents] for a in range(A)])
    first_level = np.array([p == 0 for p in template.parents])
    retrieved_parents = jnp.where(first_level[None, None, :], points[:, :, None], above[None])
    parent = jnp.concatenate([base.parents, retrieved_parents.reshape(B, A * n)], axis=1)

    # Equal paths are one node: the first alive candidate stands for all.
    same = (paths[:, :, None, :] == paths[:, None, :, :]).all(axis=3) & alive[:, None, :]
    stands_for = jnp.argmax(same, axis=2).astype(jnp.int32)
    stands_for = jnp.where(alive, stands_for, jnp.arange(Q)[None, :])

    priority = jnp.where(alive, priority, UNWANTED)
    priority = jnp.full_like(priority, UNWANTED).at[rows, stands_for].min(priority)
    order = jnp.broadcast_to(jnp.arange(Q)[None, :], (B, Q))
    priority, order = jax.lax.sort((priority, order), num_keys=1)
    short = capacity + 1 - order.shape[1]
    if short > 0:
        priority = jnp.pad(priority, ((0, 0), (0, short)), constant_values=UNWANTED)
        order = jnp.pad(order, ((0, 0), (0, short)))
    chosen, wanted = order[:, : capacity + 1], priority[:, : capacity + 1] < UNWANTED

    new_index = jnp.zeros_like(stands_for)
    columns = jnp.broadcast_to(jnp.arange(capacity + 1)[None, :], (B, capacity + 1))
    new_index = new_index.at[rows, jnp.where(wanted, chosen, Q)].set(columns, mode="drop")

    def pick(x: Array) -> Array:
        return jnp.take_along_axis(x, chosen, axis=1)

    is_root = columns == 0
    retrieved = chosen >= Nb
    parents = jnp.take_along_axis(stands_for, jnp.maximum(pick(parent), 0), axis=1)
    parents = jnp.take_along_axis(new_index, parents, axis=1)
    base_at = jnp.minimum(chosen, Nb - 1)
    return DraftTree(
        tokens=pick(token),
        parents=jnp.where(is_root, DraftTree.NO_PARENT, jnp.where(wanted, parents, 0)),
        depth=jnp.where(wanted, pick(depth), 1),
        score=jnp.where(retrieved, -jnp.inf, jnp.take_along_axis(base.score, base_at, axis=1)),
        source=jnp.where(retrieved, RETRIEVED, jnp.take_along_axis(base.source, base_at, axis=1)),
        valid=wanted,
    )


def _retrieved_paths(base, base_paths, template: Template, points, tokens) -> Int[Array, "B A n D"]:
    """Tokens from below the root down to each retrieved node: the point's own, then the template's."""
    B, A, n = tokens.shape
    longest = base_paths.shape[2] + template.max_depth
    ancestors = np.zeros((n, template.max_depth), np.int32)
    for i, nodes in enumerate(template.ancestors):
        ancestors[i, : len(nodes)] = nodes
    relative = jnp.where(ancestors > 0, tokens[:, :, np.maximum(ancestors - 1, 0)], NO_TOKEN)
    point_path = jnp.take_along_axis(base_paths, points[:, :, None], axis=1)  # [B, A, Db]
    point_depth = jnp.take_along_axis(base.depth, points, axis=1)[:, :, None, None]
    line = jnp.concatenate([jnp.broadcast_to(point_path[:, :, None, :], (B, A, n, point_path.shape[2])), relative], 3)
    # Place d holds the point's token d, and behind its depth the template's, which starts at column Db.
    place = jnp.arange(longest)[None, None, None, :]
    source = jnp.where(place < point_depth, place, base_paths.shape[2] + place - point_depth)
    picked = jnp.take_along_axis(line, jnp.minimum(source, longest - 1), axis=3)
    return jnp.where(source < longest, picked, NO_TOKEN)
