"""Faults that users met elsewhere, as tests: stops, limits, the end of the cache, compiles, retrieval edges."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toy
from oracles import Oracle, naive_generate, oracle_memory, tiny

from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, Stage
from graft_jax.engine import SpeculativeDecoder
from graft_jax.retrieval.adjacency import EMPTY, SuccessorTable
from graft_jax.tree import templates

PROMPT, K = [5, 6, 7, 8], 7


@functools.cache
def truth():
    config, params = tiny("q")
    line, margin = naive_generate(config, params, PROMPT, 41)
    assert margin > 1e-2
    return config, params, line


@functools.cache
def oracle_decoder():
    config, params, _ = truth()
    return SpeculativeDecoder(config, params, None, Oracle(K), max_length=64)


def generate(slot=K, eos=(), **settings):
    """One generation with the oracle drafter, whose slot `slot` is wrong, and given stop tokens."""
    engine = oracle_decoder()
    _, _, line = truth()
    engine.memory = oracle_memory([PROMPT + line], [slot])
    engine.config = dataclasses.replace(engine.config, eos_token_ids=tuple(eos))
    return engine.generate(PROMPT, **{"max_new_tokens": 40, **settings})


@pytest.mark.parametrize("i", range(9))
def test_case_1_stop_tokens_inside_a_block(i):
    line = truth()[2]
    x = line[i]
    first = line.index(x)
    unused = next(t for t in range(300) if t not in line)
    for eos in ([x], [unused, x]):
        out = generate(eos=eos)
        assert out.token_ids == line[: first + 1]
        assert out.finish_reason == "stop"
        assert out.stats.new_tokens == first + 1
        # Case 18: tokens behind the stop are counted nowhere.
        accepted = sum(n * rounds for n, rounds in enumerate(out.stats.acceptance_histogram))
        assert accepted == out.stats.accepted["drafted"] <= first + 1
        assert out.stats.mean_acceptance_length == (first + 1) / out.stats.rounds
    out = generate(eos=[x], ignore_eos=True)
    assert out.token_ids == line[:40] and out.finish_reason == "length"
    assert out.stats.mean_acceptance_length > 6


def test_case_1_a_drafted_stop_that_the_target_refuses():
    """The spoiled slot proposes a stop token where the target says something else."""
    line = truth()[2]
    for slot in range(K):
        # Round 1 starts at the last prompt token; its slot j stands for line[j].
        refused = (line[slot] + 1) % 300
        if refused in line[:40]:
            continue
        out = generate(slot=slot, eos=[refused])
        assert out.token_ids == line[:40] and out.finish_reason == "length"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_case_2_exactly_max_new_tokens(count):
    out = generate(max_new_tokens=count)
    assert out.token_ids == truth()[2][:count] and out.finish_reason == "length"


def test_case_2_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(max_new_tokens=0)


def test_case_11_the_end_of_the_cache():
    config, params = tiny("q")
    template = templates.TOKEN_RECYCLING.prefix(15)
    drafter = Graft(Empty(), SuccessorTable(config.vocab_size), (Stage(0, template),), template, 15)
    engine = SpeculativeDecoder(config, params, None, drafter, max_length=64)
    prompt = (PROMPT * 15)[:60]
    expected, _ = naive_generate(config, params, prompt, 4)
    session_free = engine.generate(prompt, max_new_tokens=10, ignore_eos=True)
    assert session_free.token_ids == expected and session_free.finish_reason == "length"
    with pytest.raises(ValueError, match="64 tokens.*max_length=64"):
        engine.generate((PROMPT * 16)[:64])


def test_case_11_rounds_at_the_end_leave_the_prompts_rows_alone():
    """Cache rows of the prompt are the same bytes before and after the rounds at the cache's end."""
    config, params, line = truth()
    from graft_jax.session import Request, Session

    engine = SpeculativeDecoder(config, params, None, Oracle(K), max_length=64)
    prompt = (PROMPT * 15)[:60]
    engine.memory = oracle_memory([prompt + line], [0])
    session = Session(engine, [prompt], Request(max_new_tokens=10, ignore_eos=True))
    rows = []
    for _ in session.slices(1):
        assert session.state is not None
        rows.append([np.array(v[:, :, :60]) for v in session.state.cache.values])
    assert len(rows) > 2
    for layers in rows[1:]:
        for before, after in zip(rows[0], layers):
            np.testing.assert_array_equal(before, after)


def test_case_12_lengths_seeds_and_settings_compile_nothing_new():
    """Five programs in the first pass: init with and without memory, two prefill chunks, run."""
    config, params = toy.load("llama")
    template = templates.NARROW.prefix(7)
    drafter = Graft(Empty(), SuccessorTable(config.vocab_size), (Stage(0, template),), template, 7)
    engine = SpeculativeDecoder(config, params, None, drafter, max_length=128)
    text = toy.sample_prompts(0, 1, 100, 100)[0]
    for length in (*range(5, 41, 7), 70):
        engine.generate(text[:length], max_new_tokens=4)
    assert len(engine.programs.compiled) == 5
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **kw: compiled.append(event) if "backend_compile" in event else None
    )
    before = engine.programs.compile_seconds
    lengths = []
    for i, length in enumerate(range(5, 41)):
        out = engine.generate(
            text[:length], max_new_tokens=3 + i % 5, temperature=0.5 * (i % 3), top_k=i % 4,
            top_p=1 - 0.1 * (i % 2), seed=i, budget=1 + i % 7, ignore_eos=bool(i % 2),
        )  # fmt: skip
        lengths.append(out.stats.mean_acceptance_length)
    assert engine.programs.compile_seconds == before and len(engine.programs.compiled) == 5
    assert len(set(lengths)) > 3
    # Host-side helpers (padding arrays, keys) may compile once, but nothing for each length.
    assert len(compiled) < 12


@pytest.mark.parametrize("prompt", [[7], [7, 7], [5, 6, 7, 8]])
def test_case_16_short_prompts_and_odd_rows(prompt):
    """Empty rows, self-loops, padded ids and repeated entries in the table change no output."""
    config, params = tiny("q")
    engine = edge_decoder()
    expected, margin = naive_generate(config, params, prompt, 16)
    assert margin > 1e-3
    rows = np.full((config.vocab_size, 8), EMPTY, np.int32)
    rows[7] = [7, 7, 319, 5, 5, EMPTY, EMPTY, EMPTY]  # self-loop, padding row, repeated entries
    for a, b in zip(prompt + expected, expected):
        rows[a] = [b, b, 319, a, 0, 1, 2, 3]
    table = engine.spec.drafter.table.init()[:-1]
    level = engine.spec.drafter.table.init()[-1]
    engine.memory = (None, (*table, level.replace(successors=jax.numpy.asarray(rows))))
    out = engine.generate(prompt, max_new_tokens=16, ignore_eos=True)
    assert out.token_ids == expected
    assert max(out.token_ids) < 300  # case 9: padding rows are never emitted
    engine.reset_memory()
    assert engine.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids == expected


@functools.cache
def edge_decoder():
    config, params = tiny("q")
    template = templates.TOKEN_RECYCLING.prefix(20)
    drafter = Graft(Empty(), SuccessorTable(config.vocab_size), (Stage(0, template),), template, 20)
    return SpeculativeDecoder(config, params, None, drafter, max_length=64)


def test_case_16_a_rounds_update_is_seen_by_the_next_round_only():
    """The draft of a round is what the table held before it."""
    config, params = tiny("q")
    from graft_jax.session import Request, Session

    engine = edge_decoder()
    engine.reset_memory()
    session = Session(engine, [PROMPT], Request(max_new_tokens=12, ignore_eos=True))
    drafter = engine.spec.drafter
    slices = session.slices(1)
    next(slices)
    for _ in range(4):
        state = jax.tree.map(lambda x: x.copy(), session.state)
        root = state.tokens[jax.numpy.arange(1), state.length]
        draft, _ = drafter.draft(engine.params, state.draft, root, state.length, state.active)
        counted = int(session.state.statistics.drafted_by_source[0].sum())
        next(slices)
        after = int(session.state.statistics.drafted_by_source[0].sum())
        assert after - counted == int(draft.tree.valid.sum()) - 1
