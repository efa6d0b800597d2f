"""retrieval_lookup: reference against a loop over Python's own integers, both kernels against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import INTERPRETED, CheckedLoads, jitted

from graft_jax.tree import templates
from graft_jax.tree.templates import Template
from pallas_kernels import retrieval_lookup
from pallas_kernels.retrieval_lookup.specs import SPECS, Spec

ABSENT = -1
MASK = 2**32 - 1
BAD_IDS = [-1, -7, -(2**31), 2**31 - 1]  # and V and more


def _mix(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


def _row_and_tag(tokens, rows: int) -> tuple[int, int]:
    mixed = 0x9E3779B9
    for token in tokens:
        mixed = _mix(mixed ^ (int(token) & MASK))
    return mixed & (rows - 1), _mix((mixed + 0x85EBCA6B) & MASK)


def _successor(levels, context, rank: int) -> int:
    """The longest known suffix of the context names the successor."""
    V = len(levels[-1][0])
    for order in range(len(levels), 0, -1):
        table, tags = levels[len(levels) - order]
        tokens = context[len(context) - order :]
        if min(tokens) < 0 or (order == 1 and tokens[0] >= V):
            continue
        row, tag = (tokens[0], None) if tags is None else _row_and_tag(tokens, len(table))
        if (tags is None or tags[row] == tag) and table[row][0] != ABSENT:
            token = int(table[row][rank])
            return token if 0 <= token < V else ABSENT
    return ABSENT


def _loop(levels, context, parents, ranks):
    wanted = []
    for row in np.asarray(context).tolist():
        contexts, tokens = [row], []
        for parent, rank in zip(parents, ranks):
            token = _successor(levels, contexts[parent], rank)
            contexts.append([*contexts[parent][1:], token])
            tokens.append(token)
        wanted.append(tokens)
    wanted = np.array(wanted)
    return np.maximum(wanted, 0), wanted != ABSENT


def _table(rng, spec: Spec, *, known: float = 0.8, bad: float = 0.02, tokens: int | None = None):
    """Levels in which contexts of the ids below `tokens` are known, with bad ids and empty rows among them."""
    V = spec.vocabulary
    tokens = tokens or V
    levels = []
    for order in range(spec.order, 0, -1):
        rows = V if order == 1 else 2**spec.log2_rows
        table = rng.integers(0, tokens, (rows, spec.width))
        table[rng.random((rows, spec.width)) < bad] = rng.choice([*BAD_IDS, V, V + 5])
        table[rng.random(rows) > known] = ABSENT
        tags = None
        if order > 1:
            tags = np.zeros(rows, np.uint32)
            for context in rng.integers(0, tokens, (4 * min(rows, tokens**order), order)):
                row, tag = _row_and_tag(context, rows)
                tags[row] = tag
        levels.append((table.astype(np.int32), tags))
    return levels


def _arrays(levels):
    return tuple((jnp.asarray(table), None if tags is None else jnp.asarray(tags)) for table, tags in levels)


TEMPLATES = {
    "one node": Template(((0,),)),
    "narrow": templates.NARROW,
    "wide": Template(tuple((rank,) for rank in range(8))),
    "full": templates.TOKEN_RECYCLING,
    "chain": Template(tuple((0,) * d for d in range(1, 13))),
}


@pytest.mark.parametrize("name, order", [*((name, 3) for name in TEMPLATES), ("narrow", 1), ("full", 2)])
def test_all_equal_a_loop(name, order):
    template, rng = TEMPLATES[name], np.random.default_rng(order)
    spec = Spec(9, 29, order, len(template), 8, 6)
    levels = _table(rng, spec, tokens=5)
    context = rng.integers(0, 5, (9, order))
    context[0] = ABSENT  # nothing known at all
    context[1, 0] = ABSENT  # fewer tokens than the longest context
    context[2, -1], context[3, -1], context[4, -1] = 29, 2**31 - 1, -(2**31)
    context = context.astype(np.int32)
    wanted = _loop(levels, context, template.parents, template.ranks)
    assert wanted[1].any() and not wanted[1].all() and not wanted[1][0].any()
    for implementation in ("xla", *INTERPRETED):
        lookup = jitted(retrieval_lookup, parents=template.parents, ranks=template.ranks, implementation=implementation)
        found = lookup(_arrays(levels), jnp.asarray(context))
        for a, b in zip(found, wanted):
            np.testing.assert_array_equal(a, b, err_msg=implementation)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.3]))
@settings(max_examples=15, deadline=None)
def test_reference_equals_a_loop_on_random_tables(seed, known, bad):
    rng, template = np.random.default_rng(seed), templates.NARROW
    levels = _table(rng, Spec(3, 11, 3, 31, 8, 4), known=known, bad=bad, tokens=4)
    context = rng.choice([-1, 0, 1, 2, 3, 11, 2**31 - 1], (3, 3)).astype(np.int32)
    wanted = _loop(levels, context, template.parents, template.ranks)
    found = _reference(_arrays(levels), jnp.asarray(context))
    for a, b in zip(found, wanted):
        np.testing.assert_array_equal(a, b)


_reference = jitted(
    retrieval_lookup, parents=templates.NARROW.parents, ranks=templates.NARROW.ranks, implementation="xla"
)


@pytest.mark.parametrize("name", SPECS)
def test_kernels_equal_the_reference_at_real_shapes(name):
    spec, rng = SPECS[name], np.random.default_rng(1)
    template = (templates.GRAFT_FULL if spec.nodes > 31 else templates.NARROW).prefix(spec.nodes)
    levels = _arrays(_table(rng, spec, known=1.0, bad=0.001, tokens=20))
    context = jnp.asarray(rng.integers(0, 20, (spec.points, spec.order)), jnp.int32)
    static = {"parents": template.parents, "ranks": template.ranks}
    wanted = jitted(retrieval_lookup, **static, implementation="xla")(levels, context)
    assert np.asarray(wanted[1]).mean() > 0.8
    for implementation in INTERPRETED:
        found = jitted(retrieval_lookup, **static, implementation=implementation)(levels, context)
        for a, b in zip(found, wanted):
            np.testing.assert_array_equal(a, b, err_msg=implementation)


@pytest.mark.parametrize("order", [1, 3])
def test_no_id_reads_outside_the_table(order, monkeypatch):
    loads, rng, template = CheckedLoads(monkeypatch), np.random.default_rng(0), templates.NARROW
    levels = _table(rng, Spec(40, 29, order, 31, 8, 6), bad=0.5, tokens=29)
    context = rng.choice([*BAD_IDS, 29, 30, 0, 28, 5], (40, order)).astype(np.int32)
    retrieval_lookup(
        _arrays(levels), jnp.asarray(context), template.parents, template.ranks,
        implementation="pallas-triton-interpret",
    )  # fmt: skip
    loads.assert_all_inside()


def test_refusals():
    table, tags = jnp.zeros((5, 4), jnp.int32), jnp.zeros(8, jnp.uint32)
    context = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="rank 4 must be below the 4 successors"):
        retrieval_lookup([(table, None)], context, (0,), (4,))
    with pytest.raises(ValueError, match="as many tokens as there are levels, 2"):
        retrieval_lookup([(table, tags), (table, None)], context, (0,), (0,))
    with pytest.raises(ValueError, match="level 0 of 2: .*power of two"):
        retrieval_lookup([(table, tags), (table, None)], jnp.zeros((1, 2), jnp.int32), (0,), (0,))
    with pytest.raises(ValueError, match="node 1: parent 1 must be between 0 and 0"):
        retrieval_lookup([(table, None)], context, (1,), (0,))
    with pytest.raises(NotImplementedError, match="int32 successors and uint32 tags, got int16"):
        retrieval_lookup([(table.astype(jnp.int16), None)], context, (0,), (0,), implementation="pallas-triton")
    tokens, valid = retrieval_lookup([(table, None)], context, (), ())
    assert tokens.shape == valid.shape == (1, 0)
