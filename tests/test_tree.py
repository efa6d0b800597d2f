"""Tree structure, templates, hybrid trees: against sets, recursion and dictionaries."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ancestors

from graft_jax.retrieval import fill
from graft_jax.tree import hybrid, structure, templates
from graft_jax.tree.structure import DRAFTED, RETRIEVED, ROOT, DraftTree
from graft_jax.tree.templates import Template

parent_lists = st.integers(1, 24).flatmap(
    lambda n: st.tuples(*[st.integers(0, max(i - 1, 0)) for i in range(n)]).map(lambda p: [-1, *p[1:]])
)


_mask = jax.jit(functools.partial(structure.ancestor_mask, max_depth=24))


@given(parent_lists)
@settings(max_examples=60, deadline=None)
def test_ancestor_mask_equals_sets(parents):
    padded = np.array([parents + [0] * (24 - len(parents))], np.int32)
    mask = np.asarray(_mask(padded))[0]
    for i, expected in enumerate(ancestors(parents)):
        assert set(np.flatnonzero(mask[i])) == expected


def test_ancestor_mask_example():
    mask = structure.ancestor_mask(jnp.array([[-1, 0, 0, 1, 2, 2]]), max_depth=2)
    assert np.asarray(mask[0]).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_published_templates():
    assert len(templates.TOKEN_RECYCLING) == 80
    assert templates.TOKEN_RECYCLING.depth_counts == (8, 21, 25, 15, 8, 3)
    stages = (templates.GRAFT_FULL, templates.GRAFT_D0, templates.GRAFT_D1, templates.GRAFT_D5)
    assert [len(t) for t in stages] == [80, 52, 36, 20]
    for outer, inner in zip(stages, stages[1:]):
        assert set(inner.paths) < set(outer.paths)
    assert all(t.paths.count((0,) * 9) == 1 and t.width <= 8 for t in stages)


def test_graft_preset_is_the_templates():
    preset = json.loads((Path(__file__).parent.parent / "configs" / "graft" / "qwen3-8b.json").read_text())
    for name, template in (("d0", templates.GRAFT_D0), ("d1", templates.GRAFT_D1), ("d5", templates.GRAFT_D5)):
        stage = preset["stages"][name]
        assert tuple(stage["depth_counts"]) == template.depth_counts
        assert stage["retrieved"] == len(template) == preset["budget"] - stage["drafted"]
        assert all(0 < thresholds[name] < 1 for thresholds in preset["thresholds"].values())


@pytest.mark.parametrize("size", [3, 5, 7, 15, 31])
def test_narrow_templates_are_nested_prefixes(size):
    template = templates.NARROW.prefix(size)
    assert len(template) == size and set(template.paths) <= set(templates.NARROW.paths)


@pytest.mark.parametrize(
    ("paths", "message"),
    [(((0, 0),), "before its parent"), (((0,), (0,)), "twice"), (((),), "at least 0"), (((-1,),), "at least 0")],
)
def test_broken_templates_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        Template(paths)


def test_depth_counts_out_of_range():
    with pytest.raises(ValueError, match="depth 2 asks for 9"):
        templates.from_depth_counts((1, 9))


def _base(rows):
    """A base tree batch from [(token, parent), ...] lists without roots, root token 0."""
    N = 7
    arrays = {name: np.zeros((len(rows), N), np.int32) for name in ("tokens", "parents", "depth")}
    valid = np.zeros((len(rows), N), bool)
    for b, nodes in enumerate(rows):
        arrays["parents"][b, 0] = -1
        valid[b, : len(nodes) + 1] = True
        for i, (token, parent) in enumerate(nodes, 1):
            arrays["tokens"][b, i], arrays["parents"][b, i] = token, parent
            arrays["depth"][b, i] = arrays["depth"][b, parent] + 1
    score = -np.arange(N, dtype=np.float32)[None] + np.zeros((len(rows), 1), np.float32)
    source = np.where(np.arange(N)[None] == 0, ROOT, DRAFTED) + np.zeros((len(rows), 1), np.int32)
    arrays |= {"score": score, "source": source.astype(np.int32), "valid": valid}
    return DraftTree(**{name: jnp.asarray(array) for name, array in arrays.items()})


def _paths(tree, row):
    """{token path: source} of the valid nodes."""
    found, texts = {}, {}
    for i in range(tree.capacity):
        if not bool(tree.valid[row, i]):
            continue
        parent = int(tree.parents[row, i])
        assert parent < i and (i == 0 or tree.valid[row, parent])
        texts[i] = (*texts[parent], int(tree.tokens[row, i])) if i else ()
        assert texts[i] not in found, "duplicate siblings"
        assert int(tree.depth[row, i]) == len(texts[i])
        found[texts[i]] = int(tree.source[row, i])
    return found


def _merge_oracle(base, row, template, tokens, valid, keep, capacity):
    """The merge as a dictionary of token paths with the best priority each."""
    texts, best = {0: ()}, {}
    order = 0

    def offer(path, source):
        nonlocal order
        order += 1
        if path not in best:
            best[path] = (order, source)
        elif source == DRAFTED:
            best[path] = (best[path][0], DRAFTED)

    nodes = [i for i in range(1, base.capacity) if base.valid[row, i]]
    for i in nodes:
        texts[i] = (*texts[int(base.parents[row, i])], int(base.tokens[row, i]))
    retrieved = {(): ()}
    for j, path in enumerate(template.paths):
        if valid[row, j] and path[:-1] in retrieved:
            retrieved[path] = (*retrieved[path[:-1]], int(tokens[row, j]))
    for i in nodes[:keep]:
        offer(texts[i], DRAFTED)
    for path in template.paths:
        if path in retrieved:
            offer(retrieved[path], RETRIEVED)
    for i in nodes[keep:]:
        offer(texts[i], DRAFTED)
    chosen = sorted(best, key=lambda path: best[path][0])[:capacity]
    return {(): ROOT} | {path: best[path][1] for path in chosen}


_merge = jax.jit(hybrid.merge, static_argnums=(2, 8))
_node_paths = jax.jit(functools.partial(fill.node_paths, max_depth=6))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_merge_equals_dictionary(data):
    template = templates.from_depth_counts((3, 3, 2))
    rows = []
    for _ in range(2):
        nodes, siblings = [], set()
        for i in range(data.draw(st.integers(0, 6))):
            parent, token = data.draw(st.integers(0, i)), data.draw(st.integers(1, 4))
            if (parent, token) in siblings:
                break
            siblings.add((parent, token))
            nodes.append((token, parent))
        rows.append(nodes)
    base = _base(rows)
    n = len(template)
    closed = [template.paths.index(path[:-1]) if len(path) > 1 else None for path in template.paths]
    tokens = np.array(data.draw(st.lists(st.integers(1, 4), min_size=2 * n, max_size=2 * n))).reshape(2, n)
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=2 * n, max_size=2 * n))).reshape(2, n)
    for j, above in enumerate(closed):
        valid[:, j] &= True if above is None else valid[:, above]
    keep, capacity = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([2, 7, 16]))
    kept = min(keep, base.capacity - 1)
    priority = np.array(
        [*range(kept + 1), *(kept + 1 + n + i for i in range(base.capacity - 1 - kept)),
         *range(kept + 1, kept + 1 + n)]
    )[None].repeat(2, 0)  # fmt: skip
    tree = _merge(
        base, _node_paths(base), template, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool),
        jnp.asarray(tokens, jnp.int32)[:, None], jnp.asarray(valid)[:, None],
        jnp.asarray(priority, jnp.int32), capacity,
    )  # fmt: skip
    tree = jax.device_get(tree)
    for row in range(2):
        assert _paths(tree, row) == _merge_oracle(base, row, template, tokens, valid, kept, capacity)


def test_truncate_keeps_a_prefix():
    tree = _base([[(1, 0), (2, 1), (3, 0)]] * 2)
    small = structure.truncate(tree, jnp.array([1, 3]))
    assert np.asarray(small.valid).tolist() == [
        [True] * 2 + [False] * 5,
        [True] * 4 + [False] * 3,
    ]
