"""EAGLE's dynamic tree and its gates against a plain loop over lists."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from graft_jax.tree import beam as beams
from graft_jax.tree import gates as gating
from graft_jax.tree.beam import Beam
from graft_jax.tree.gates import Gates

V = 50


def successors(path, k, ties):
    """The k best successors of a path and their log-probabilities, fixed by the path alone."""
    rng = np.random.default_rng(zlib.crc32(str(path).encode()))
    tokens = rng.permutation(V)[:k]
    logits = rng.choice([0.0, 1.0, 2.0], k) if ties else rng.normal(size=k) * 2
    log_probs = np.sort((logits - np.log(np.exp(logits).sum() + 1.0)).astype(np.float32))[::-1]
    if ties:  # equal ones come with the lower id first
        tokens = np.array([t for _, t in sorted(zip(-log_probs, sorted(tokens)))])
    return tokens.astype(np.int32), log_probs


def oracle(root, beam, gates, thresholds, ties):
    """The published algorithm: (path, score) of the kept nodes in order, stage, and expansions."""

    def key(node):
        path, score = node
        return (-score, len(path), path)

    def children(path, score):
        tokens, log_probs = successors((root, *path), beam.top_k, ties)
        return [((*path, int(t)), np.float32(score) + np.float32(p)) for t, p in zip(tokens, log_probs)]

    level = children((), np.float32(0))
    pool, stage, forwards = list(level), 0, 0
    for depth in range(beam.depth + 1):
        if depth:
            level = [child for node in level for child in children(*node)]
            pool += level
            level = sorted(level, key=key)[: beam.top_k]
            forwards += 1
        scores = np.array([score for _, score in level], np.float32)
        confidence = np.exp(scores.max()) if gates.measure == "best" else np.exp(scores).sum()
        if depth in gates.depths and confidence <= thresholds[gates.depths.index(depth)]:
            stage = gates.depths.index(depth) + 1
            break
    return sorted(pool, key=key)[: beam.total], stage, forwards


def grow(roots, beam, gates, thresholds, ties):
    W = beam.top_k
    lines = [successors((int(root),), W, ties) for root in roots]
    B = len(roots)

    import jax

    def ask(paths, lengths):
        tokens, log_probs = np.zeros((B, W, W), np.int32), np.zeros((B, W, W), np.float32)
        for b in range(B):
            for w in range(W):
                path = tuple(int(t) for t in paths[b, w, :lengths])
                tokens[b, w], log_probs[b, w] = successors(path, W, ties)
        return tokens, log_probs

    def expand(paths, depth, lanes):
        paths = jnp.take_along_axis(paths, lanes.came_from[:, :, None], axis=1)
        paths = jnp.where(jnp.arange(paths.shape[2])[None, None, :] == depth + 1, lanes.tokens[:, :, None], paths)
        shapes = jax.ShapeDtypeStruct((B, W, W), jnp.int32), jax.ShapeDtypeStruct((B, W, W), jnp.float32)
        tokens, log_probs = jax.pure_callback(ask, shapes, paths, depth + 2)
        return tokens, log_probs, paths

    carry = jnp.zeros((B, W, beam.depth + 2), jnp.int32).at[:, :, 0].set(jnp.asarray(roots)[:, None])
    return beams.grow(
        beam, gates, jnp.asarray(thresholds, jnp.float32), jnp.asarray(roots, jnp.int32),
        jnp.asarray(np.stack([t for t, _ in lines])), jnp.asarray(np.stack([p for _, p in lines])),
        expand, carry, jnp.ones(B, bool),
    )  # fmt: skip


def path_of(tree, row, node):
    path = []
    while node:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return tuple(reversed(path))


@pytest.mark.parametrize("measure", ["best", "beam"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 2, 7), (3, 4, 20), (4, 5, 40)])
def test_equals_the_published_algorithm(sizes, ties, measure):
    beam = Beam(*sizes)
    depths = tuple(d for d in (0, 1, 3) if d <= beam.depth)
    gates, roots = Gates(depths, measure), [3, 7, 11, 19]
    stages = set()
    for level in (-1.0, 0.05, 0.3, 2.0):
        thresholds = [level] * len(depths)
        draft = grow(roots, beam, gates, thresholds, ties)
        for row, root in enumerate(roots):
            nodes, stage, forwards = oracle(root, beam, gates, thresholds, ties)
            found = [path_of(draft.tree, row, i) for i in range(1, beam.total + 1) if draft.tree.valid[row, i]]
            assert found == [path for path, _ in nodes]
            assert int(draft.stage[row]) == stage and int(draft.forwards[row]) == forwards
            scores = np.asarray(draft.tree.score[row, 1 : len(nodes) + 1])
            np.testing.assert_array_equal(scores, np.array([score for _, score in nodes], np.float32))
            stages.add(stage)
    assert len(stages) > 1  # gates both opened and closed


def test_the_split_scales_from_table_7():
    assert [gating.kept_nodes(depth, 60, 8) for depth in (0, 1, 5, 8)] == [8, 24, 40, 60]
    assert gating.scaled(8) == (0, 1, 5) and gating.scaled(5) == (0, 1, 3)
    assert [gating.kept_nodes(depth, 7, 5) for depth in (0, 1, 3, 5)] == [1, 3, 5, 7]


def test_a_budget_above_the_pool_is_refused():
    with pytest.raises(ValueError, match="budget=9 is more than the 6 nodes"):
        Beam(1, 2, 9)
