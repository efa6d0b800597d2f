"""The successor table and template filling, against dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_jax.retrieval import fill
from graft_jax.retrieval.adjacency import EMPTY, SuccessorTable
from graft_jax.tree import templates
from graft_jax.tree.structure import DraftTree

V = 12
TABLE = SuccessorTable(V, order=3, width=3, log2_rows=14)  # no two contexts of the tests share a row
_update = jax.jit(TABLE.update)
_summed = jax.jit(TABLE.update_summed)
_lookup = jax.jit(TABLE.lookup)


class Dictionaries:
    """One dictionary an order, keyed by tuples of tokens."""

    def __init__(self):
        self.rows = {}

    def keys(self, context):
        return [tuple(context[3 - n :]) for n in (3, 2, 1) if EMPTY not in context[3 - n :]]

    def lookup(self, context):
        for key in self.keys(context):
            if key in self.rows:
                return self.rows[key]
        return [EMPTY] * 3

    def update(self, contexts, successors, write, preferred):
        order = sorted(range(len(contexts)), key=lambda i: (preferred[i], i))
        for i in order:
            for key in self.keys(contexts[i]) if write[i] else ():
                self.rows[key] = list(successors[i])


entries = st.lists(
    st.tuples(
        st.lists(st.integers(-1, 3), min_size=2, max_size=2),
        st.integers(0, 3),
        st.permutations(range(5)).map(lambda p: p[:3]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=8,
    max_size=8,
)


@given(st.lists(entries, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_update_and_lookup_equal_dictionaries(rounds):
    levels, model = TABLE.init(), Dictionaries()
    for batch in rounds:
        contexts = [[*before, last] for before, last, *_ in batch]
        # An absent token is never followed by a present one's history: keep contexts well formed.
        contexts = [[EMPTY if c[1] == EMPTY else c[0], c[1], c[2]] for c in contexts]
        successors = [list(row[2]) for row in batch]
        write, preferred = [row[3] for row in batch], [row[4] for row in batch]
        levels = _update(levels, jnp.array(contexts), jnp.array(successors), jnp.array(write), jnp.array(preferred))
        model.update(contexts, successors, write, preferred)
        found = np.asarray(_lookup(levels, jnp.array(contexts)))
        for context, row in zip(contexts, found.tolist()):
            assert row == model.lookup(context)


def test_summed_update_adds_probabilities_of_repeated_tokens():
    table = SuccessorTable(V, order=1, width=3)
    contexts = jnp.array([[5], [6], [5], [5]])
    successors = jnp.array([[1, 2, 3], [4, 5, 6], [2, 3, 4], [7, 8, 9]])
    weights = jnp.array([[0.5, 0.3, 0.1], [0.9, 0.05, 0.01], [0.4, 0.3, 0.2], [0.9, 0.05, 0.04]])
    write = jnp.array([True, True, True, False])
    levels = table.update_summed(table.init(), contexts, successors, weights, write)
    # 5: 2 has 0.7, 1 has 0.5, 3 has 0.4; the entry that is not to be written counts for nothing.
    assert np.asarray(levels[0].successors[5]).tolist() == [2, 1, 3]
    assert np.asarray(levels[0].successors[6]).tolist() == [4, 5, 6]
    assert np.asarray(levels[0].successors[7]).tolist() == [EMPTY] * 3


def test_ids_outside_the_vocabulary_touch_nothing():
    levels = TABLE.init()
    contexts = jnp.array([[EMPTY, EMPTY, V], [EMPTY, EMPTY, EMPTY], [EMPTY, EMPTY, 2**30]])
    rows = jnp.zeros((3, 3), jnp.int32)
    after = _update(levels, contexts, rows, jnp.ones(3, bool), jnp.zeros(3, bool))
    for old, new in zip(levels, after):
        np.testing.assert_array_equal(np.asarray(old.successors), np.asarray(new.successors))
    assert np.asarray(_lookup(levels, contexts)).tolist() == [[EMPTY] * 3] * 3


def test_fill_template_follows_ranks_and_stops_at_empty_rows():
    table = SuccessorTable(V, order=1, width=3)
    rows = np.full((V, 3), EMPTY, np.int32)
    rows[4], rows[5], rows[7] = [5, 7, 9], [6, 4, EMPTY], [7, 8, 1]  # 7 loops on itself; 6 and 9 know nothing
    levels = (table.init()[0].replace(successors=jnp.asarray(rows)),)
    template = templates.Template(((0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (0, 0, 0), (0, 1, 0)))
    tokens, valid = fill.fill_template(template, table, levels, jnp.array([[4], [6]]))
    assert np.asarray(valid[0]).tolist() == [True] * 5 + [False, True, False, False, True]
    assert np.asarray(tokens[0])[np.asarray(valid[0])].tolist() == [5, 7, 9, 6, 4, 7, 5]
    assert not np.asarray(valid[1]).any() and (np.asarray(tokens) >= 0).all()


def test_contexts_of_nodes_run_into_the_history():
    zero = jnp.zeros((1, 4), jnp.int32)
    tree = DraftTree(
        tokens=jnp.array([[10, 11, 12, 13]]), parents=jnp.array([[-1, 0, 0, 2]]), depth=zero,
        score=jnp.zeros((1, 4)), source=zero, valid=jnp.ones((1, 4), bool),
    )  # fmt: skip
    contexts = fill.node_contexts(tree, jnp.array([[EMPTY, 9]]))
    assert np.asarray(contexts[0]).tolist() == [[EMPTY, 9, 10], [9, 10, 11], [9, 10, 12], [10, 12, 13]]
    assert np.asarray(fill.node_contexts(tree, jnp.zeros((1, 0), jnp.int32))[0]).tolist() == [[10], [11], [12], [13]]


def test_sequence_contexts_and_advance():
    tokens, history = jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([[EMPTY, EMPTY], [8, 9]])
    contexts = fill.sequence_contexts(tokens, history)
    assert np.asarray(contexts[0]).tolist() == [[-1, -1, 1], [-1, 1, 2], [1, 2, 3]]
    assert np.asarray(contexts[1]).tolist() == [[8, 9, 4], [9, 4, 5], [4, 5, 6]]
    advanced = fill.advance(history, tokens, jnp.array([1, 0]))
    assert np.asarray(advanced).tolist() == [[EMPTY, 1], [8, 9]]


@pytest.mark.parametrize("bad", [{"order": 0}, {"width": 0}, {"width": V + 1}, {"log2_rows": 0}])
def test_bad_tables_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SuccessorTable(V, **bad)
