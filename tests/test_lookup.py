"""Prompt lookup against a search in Python."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft_jax.drafters.lookup import Lookup, LookupState

K, S = 4, 24
DRAFTER = Lookup(K, prompt_lookup_max=3, prompt_lookup_min=2)


@jax.jit
def propose(tokens, length):
    root = jax.numpy.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    state = LookupState(jax.numpy.pad(tokens, ((0, 0), (0, K + 1))), length)
    tree = DRAFTER.draft(None, state, root, length, length >= 0)[0].tree
    return tree.tokens[:, 1:], tree.valid[:, 1:]


def search(line):
    for n in (3, 2):
        for end in range(n, len(line)):
            if line[end - n : end] == line[-n:]:
                return line[end : end + K]
    return []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=S), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_proposals_equal_a_search(lines):
    tokens = np.zeros((2, S), np.int32)
    for row, line in zip(tokens, lines):
        row[: len(line)] = line
    drafted, valid = map(np.asarray, propose(tokens, np.array([len(line) - 1 for line in lines], np.int32)))
    for row, line in enumerate(lines):
        assert drafted[row][valid[row]].tolist() == search(line)


@pytest.mark.parametrize("bad", [{"prompt_lookup_min": 0}, {"prompt_lookup_min": 4}, {"capacity": 0}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Lookup(**bad)
