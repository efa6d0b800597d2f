"""The decoder's surface: prompts, streams, memory, interruption, errors, one program without callbacks."""

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import graft_jax
from graft_jax import decode
from graft_jax.engine import SpeculativeDecoder
from graft_jax.methods import METHODS, Context, Options
from graft_jax.prompts import split_prompts


@functools.cache
def engine():
    config, params = toy.load("llama")
    method = METHODS["recycling"]
    return SpeculativeDecoder(
        config, params, None, method.build(Context(config), Options()).drafter, max_length=256, method="recycling"
    )


PROMPT = toy.sample_prompts(11, 1, 24, 24)[0]


def test_prompts_are_told_apart():
    message = {"role": "user", "content": "Hi"}
    assert split_prompts("Hi") == (True, ["Hi"])
    assert split_prompts([1, 2]) == (True, [[1, 2]])
    assert split_prompts(np.array([1, 2]))[0]
    assert split_prompts([message]) == (True, [[message]])
    assert split_prompts([[message], "Why?", [1, 42]]) == (False, [[message], "Why?", [1, 42]])


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt is empty"),
        ([5, 320], {}, "prompt id 320 at position 1"),
        ([5, -1], {}, "prompt id -1"),
        ("text", {}, "no tokenizer"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([5], {"temperature": -0.1}, "temperature=-0.1"),
        ([5], {"top_p": 0.0}, "top_p=0.0"),
        ([5], {"budget": 8}, "budget=8 is above"),
        ([5], {"budget": 0}, "budget=0"),
        ([5] * 256, {}, "256 tokens"),
        ([[5], [6]], {"seed": [1]}, "seed has 1 entries for 2"),
        ([5], {"seed": -1}, "seed=-1"),
        ([[5], "x"], {}, "no tokenizer"),
    ],
)
def test_errors_name_what_is_wrong(prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        engine().generate(prompt, **settings)


def test_unknown_names():
    with pytest.raises(ValueError, match="did you mean 'recycling'"):
        SpeculativeDecoder.from_pretrained(method="recycle")
    with pytest.raises(ValueError, match="unknown options"):
        SpeculativeDecoder.from_pretrained(bugdet=3)
    with pytest.raises(ValueError, match="max_length=1"):
        SpeculativeDecoder.from_pretrained(max_length=1)
    with pytest.raises(ValueError, match="budget=0"):
        Options(budget=0)


def test_stream_equals_generate():
    engine().reset_memory()
    whole = engine().generate(PROMPT, max_new_tokens=40)
    engine().reset_memory()
    chunks = list(engine().stream(PROMPT, max_new_tokens=40))
    assert sum((chunk.token_ids for chunk in chunks), []) == whole.token_ids
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].result.token_ids == whole.token_ids and len(chunks) > 3
    with pytest.raises(ValueError, match="one prompt"):
        engine().stream([[5], [6]])


def test_memory_lives_on_is_saved_loaded_and_reset(tmp_path):
    decoder = engine()
    decoder.reset_memory()
    first = decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    decoder.save_memory(tmp_path / "table.npz")
    second = decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert second.token_ids == first.token_ids
    assert second.stats.rounds < first.stats.rounds
    decoder.reset_memory()
    assert decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True).stats.rounds == first.stats.rounds
    decoder.load_memory(tmp_path / "table.npz")
    assert decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True).stats.rounds == second.stats.rounds
    other = decoder.with_method("recycling", table_order=1)
    with pytest.raises(ValueError, match="table.npz"):
        other.load_memory(tmp_path / "table.npz")
    assert first.stats.policy["settings"]["table"]["order"] == 3
    assert first.stats.policy["kernels"] == {"retrieval_lookup": "xla", "topk_rows": "xla"}


def test_interrupt_ends_after_the_slice_and_keeps_the_text():
    decoder = engine()
    decoder.reset_memory()
    whole = decoder.generate(PROMPT, max_new_tokens=200, ignore_eos=True)
    decoder.reset_memory()
    seen = []

    def interrupt(done):
        seen.append(done)
        if done > 1:
            os.kill(os.getpid(), signal.SIGINT)

    out = decoder.generate(PROMPT, max_new_tokens=200, ignore_eos=True, on_progress=interrupt)
    assert out.finish_reason == "interrupted" and len(seen) == 2
    assert 1 < len(out.token_ids) < 200 and out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert decoder.generate(PROMPT, max_new_tokens=4).finish_reason == "length"  # still usable


def test_a_smaller_budget_verifies_fewer_nodes():
    decoder = engine()
    outs = []
    for budget in (1, 3, 7):
        decoder.reset_memory()
        outs.append(decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True, budget=budget))
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    for budget, out in zip((1, 3, 7), outs):
        assert 0 < out.stats.drafted["retrieved"] <= budget * out.stats.rounds
    lengths = [out.stats.mean_acceptance_length for out in outs]
    assert 1.1 < lengths[0] < lengths[2]


def test_a_slice_is_one_program_without_callbacks():
    """Nothing inside `run` talks to the host, and the functional layer works inside the user's own jit."""
    decoder = engine()
    spec = decoder.spec
    tokens = jnp.zeros((1, spec.cache_size), jnp.int32).at[0, : len(PROMPT)].set(jnp.array(PROMPT))

    @jax.jit
    def mine(params, tokens):
        length = jnp.array([len(PROMPT)])
        stops = jnp.full(16, -1)
        config = graft_jax.sampling.make([0])
        state = graft_jax.init_state(spec, params, tokens, length, length + 30, length * 0 + 7, stops, config)
        for start in (0, 16):
            state = graft_jax.prefill_chunk(spec, params, state, jnp.int32(start), 16)
        return graft_jax.run(spec, params, state, jnp.int32(100))

    lowered = mine.lower(decoder.params, tokens)
    text = lowered.as_text()
    assert "while" in text
    for word in ("callback", "infeed", "outfeed", "send", "recv"):
        assert f"stablehlo.{word}" not in text and f"xla_python_cpu_{word}" not in text
    state = lowered.compile()(decoder.params, tokens)
    decoder.reset_memory()
    out = decoder.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert np.asarray(state.tokens)[0, len(PROMPT) : len(PROMPT) + 30].tolist() == out.token_ids
    assert int(state.statistics.rounds[0]) == out.stats.rounds


def test_step_by_step_equals_run():
    """A Python loop over `decode_step` and the device loop are the same."""
    decoder = engine()
    spec, params = decoder.spec, decoder.params
    length = jnp.array([16])
    tokens = jnp.zeros((1, spec.cache_size), jnp.int32).at[0, :16].set(jnp.array(PROMPT[:16]))
    state = decode.init_state(
        spec, params, tokens, length, length + 12, jnp.array([7]), jnp.full(16, -1), graft_jax.sampling.make([0])
    )
    state = jax.jit(decode.prefill_chunk, static_argnums=(0, 4))(spec, params, state, jnp.int32(0), 16)
    step = jax.jit(decode.decode_step, static_argnums=0)
    looped = state
    while bool(looped.active.any()):
        looped = step(spec, params, looped)
    whole = jax.jit(decode.run, static_argnums=0)(spec, params, state, jnp.int32(99))
    for a, b in zip(jax.tree.leaves(looped), jax.tree.leaves(whole)):
        if jnp.issubdtype(a.dtype, jnp.integer):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
