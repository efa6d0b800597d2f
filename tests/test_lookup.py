"""Prompt lookup against a search in Python."""

import jax
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive_generate, safe_seed

from graft_jax.drafters.lookup import Lookup, LookupState
from graft_jax.engine import SpeculativeDecoder

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


@pytest.mark.parametrize("name", toy.NAMES)
def test_lossless_on_texts_that_repeat(name):
    """Greedy and sampled, alone and in a ragged batch, on prompts that hold their own continuation."""
    config, params = toy.load(name)
    engine = SpeculativeDecoder(config, params, None, Lookup(7), max_length=256, row_buckets=(4,))
    starts = [toy.safe_prompts(name, 7)[i] for i in (0, 1, 5, 6)]
    lines = [start + naive_generate(config, params, start, 40)[0] + start for start in starts]
    expected = []
    for line in lines:
        tokens, margin = naive_generate(config, params, line, 32)
        assert margin > 1e-2
        expected.append(tokens)
    outs = engine.generate(lines, max_new_tokens=32, ignore_eos=True)
    assert [out.token_ids for out in outs] == expected
    assert 4 * 32 / sum(out.stats.rounds for out in outs) > 2
    assert engine.generate(lines[0], max_new_tokens=32, ignore_eos=True).token_ids == expected[0]
    sampled = {"temperature": 0.6, "top_p": 0.9}
    found = [safe_seed(config, params, line, 24, **sampled) for line in lines]
    outs = engine.generate(lines, max_new_tokens=24, ignore_eos=True, seed=[s for s, _ in found], **sampled)
    assert [out.token_ids for out in outs] == [tokens for _, tokens in found]
    assert 4 * 24 / sum(out.stats.rounds for out in outs) > 1.3


@pytest.mark.parametrize("bad", [{"prompt_lookup_min": 0}, {"prompt_lookup_min": 4}, {"capacity": 0}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Lookup(**bad)
