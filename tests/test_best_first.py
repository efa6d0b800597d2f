"""Best-first trees against a heap, and DDTree's optimality against brute force."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_jax.tree.best_first import BestFirst, grow

V = 6


def log_probs(seed, sharpness, ties):
    """log p(token | the path's last token, depth) [depth, last, token]; rounded ones tie often."""
    rng = np.random.default_rng(seed)
    table = -sharpness * rng.exponential(size=(5, V, V)).astype(np.float32)
    return np.round(table) if ties else table


def heap(table, sizes, root):
    """(path, score) of the best nodes, popped one by one: score descending, depth ascending, tokens in order."""

    def push(path, score):
        if len(path) == sizes.depth:
            return
        row = table[len(path), path[-1] if path else root]
        best = sorted(range(V), key=lambda token: (-row[token], token))[: sizes.children]
        for token in best:
            child = np.float32(score + min(row[token], np.float32(0)))
            heapq.heappush(queue, (-child, len(path) + 1, (*path, token)))

    queue, out = [], []
    push((), np.float32(0))
    while queue and len(out) < sizes.budget:
        falling, _, path = heapq.heappop(queue)
        out.append((path, -falling))
        push(path, -falling)
    return out


@functools.partial(jax.jit, static_argnums=0)
def build(sizes, table, root, active):
    B, C = root.shape[0], sizes.children
    rows = jnp.arange(B)

    def best(row):
        values, ids = jax.lax.top_k(row, C)
        return ids.astype(jnp.int32), values

    def expand(carry, depth, lanes):
        return *best(table[rows[:, None], depth, lanes.tokens]), carry

    return grow(sizes, root, *best(table[rows, 0, root]), expand, (), active)


def paths(tree, row):
    """(path, score) of the valid nodes in order; checks the tree's form on the way."""
    out, seen = [()], set()
    for i in range(1, tree.capacity):
        parent = int(tree.parents[row, i])
        assert parent < i
        if not tree.valid[row, i]:
            out.append(None)
            continue
        assert tree.valid[row, parent]
        path = (*out[parent], int(tree.tokens[row, i]))
        assert path not in seen and len(path) == tree.depth[row, i]
        seen.add(path)
        out.append(path)
    return [(path, tree.score[row, i + 1]) for i, path in enumerate(out[1:]) if path is not None]


SIZES = [BestFirst(5, 12, 6), BestFirst(4, 7, 2), BestFirst(1, 4, 6), BestFirst(5, 3, 1), BestFirst(2, 40, 6)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=3, max_size=3),
    sharpness=st.sampled_from([0.0, 0.5, 2.0, 10.0]),
    ties=st.booleans(),
)
def test_equals_the_heap(sizes, seeds, sharpness, ties):
    tables = np.stack([log_probs(seed, sharpness, ties) for seed in seeds])
    draft = build(sizes, tables, jnp.array([1, 4, 0]), jnp.array([True, True, False]))
    tree = jax.tree.map(np.asarray, draft.tree)
    for row, root in enumerate((1, 4)):
        found = paths(tree, row)
        expected = heap(tables[row], sizes, root)
        assert found == expected
        assert len(found) <= sizes.budget
        best = min(range(V), key=lambda token: (-tables[row, 0, root, token], token))
        assert found[0][0] == (best,)
    assert not tree.valid[2, 1:].any()
    assert draft.forwards[2] == 0


def test_rows_do_not_depend_on_one_another():
    sizes = SIZES[0]
    tables = np.stack([log_probs(0, 10.0, False), log_probs(1, 0.1, False)])
    both = build(sizes, tables, jnp.array([1, 2]), jnp.ones(2, bool))
    one = build(sizes, tables[:1], jnp.array([1]), jnp.ones(1, bool))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:1], y), both, one)


def test_stops_early_on_a_peaked_distribution():
    """Beside a sure first token nothing deeper than the second best sibling is worth a look."""
    table = np.full((1, 5, V, V), -20.0, np.float32)
    table[:, 0, :, :3] = [-0.1, -0.2, -0.3]
    draft = build(BestFirst(5, 3, 6), table, jnp.array([0]), jnp.ones(1, bool))
    assert int(draft.forwards[0]) == 1
    assert np.isnan(np.asarray(draft.confidence)[0]).tolist() == [False, False, True, True, True]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 4))
def test_no_tree_of_its_size_accepts_more(seed, budget):
    """DDTree, propositions 1 and 2: the sum of path probabilities is the expected acceptance."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.ones(3), size=3)
    nodes = [path for d in (1, 2, 3) for path in itertools.product(range(3), repeat=d)]
    mass = {path: np.prod([q[i, token] for i, token in enumerate(path)]) for path in nodes}

    def closed(tree):
        return all(len(path) == 1 or path[:-1] in tree for path in tree)

    most = max(sum(mass[p] for p in tree) for tree in itertools.combinations(nodes, budget) if closed(set(tree)))
    table = np.full((1, 5, V, V), -np.inf, np.float32)
    table[0, :3, :, :3] = np.log(q)[:, None, :]
    tree = jax.tree.map(np.asarray, build(BestFirst(3, budget, 6), table, jnp.array([0]), jnp.ones(1, bool)).tree)
    assert sum(mass[path] for path, _ in paths(tree, 0)) == pytest.approx(most, rel=1e-5)
