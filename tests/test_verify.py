"""The walk against recursion on random trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import walk

from graft_jax import sampling, verify
from graft_jax.tree.structure import DRAFTED, ROOT, DraftTree

B, N, V = 2, 9, 4
_accept = jax.jit(functools.partial(verify.accept, max_depth=N - 1))

trees = st.tuples(
    st.lists(st.integers(0, 100), min_size=N - 1, max_size=N - 1),  # parents, modulo what stands before
    st.lists(st.integers(0, V - 1), min_size=N, max_size=N),  # tokens
    st.lists(st.booleans(), min_size=N, max_size=N),  # validity, closed below
    st.lists(st.integers(0, V - 1), min_size=N, max_size=N),  # what the target chooses at each node
)


@given(st.lists(trees, min_size=B, max_size=B), st.lists(st.booleans(), min_size=B, max_size=B))
@settings(max_examples=200, deadline=None)
def test_accept_equals_recursion(rows, active):
    parents = np.full((B, N), -1, np.int32)
    depth, tokens, valid = np.zeros((B, N), np.int32), np.zeros((B, N), np.int32), np.ones((B, N), bool)
    logits = np.zeros((B, N, V), np.float32)
    for b, (above, names, keep, choices) in enumerate(rows):
        tokens[b] = names
        for i in range(1, N):
            parents[b, i] = above[i - 1] % i
            depth[b, i] = depth[b, parents[b, i]] + 1
            valid[b, i] = keep[i] and valid[b, parents[b, i]]
        logits[b, np.arange(N), choices] = 1.0
    tree = DraftTree(
        tokens=jnp.asarray(tokens),
        parents=jnp.asarray(parents),
        depth=jnp.asarray(depth),
        score=jnp.zeros((B, N)),
        source=jnp.asarray(np.where(depth == 0, ROOT, DRAFTED).astype(np.int32)),
        valid=jnp.asarray(valid),
    )
    verdict = jax.device_get(
        _accept(tree, jnp.asarray(logits), sampling.make([0] * B), jnp.array([3, 7]), jnp.array(active))
    )
    host = jax.device_get(tree)
    for b, (*_, choices) in enumerate(rows):
        if not active[b]:
            assert verdict.num_accepted[b] == 0
            continue
        path, emitted = walk(host, b, choices)  # the first child that carries the token, of repeated siblings too
        n = len(path) - 1
        assert verdict.num_accepted[b] == n and verdict.count[b] == n + 1
        assert verdict.path[b, : n + 1].tolist() == path and not verdict.path[b, n + 1 :].any()
        assert verdict.tokens[b, : n + 1].tolist() == emitted and not verdict.tokens[b, n + 1 :].any()
        assert verdict.bonus[b] == emitted[-1]
