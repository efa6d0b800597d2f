"""Losslessness: speculative output equals plain decoding's, and plain decoding's a naive reference's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import Oracle, naive_generate, oracle_memory, safe_seed, tiny

from graft_jax import decode, sampling
from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, Stage
from graft_jax.engine import SpeculativeDecoder
from graft_jax.retrieval.adjacency import SuccessorTable
from graft_jax.tree import templates

NEW = 48
RAGGED = (1, 3, 17, 40)  # prompt lengths


def recycling(V, order=3, budget=7, attach="root"):
    template = templates.NARROW.prefix(budget)
    return Graft(Empty(), SuccessorTable(V, order=order), (Stage(0, template),), template, budget, attach)


@functools.cache
def decoder(name, method):
    config, params = toy.load(name)
    drafter = {"ar": Empty(), "recycling": recycling(config.vocab_size)}[method]
    return SpeculativeDecoder(config, params, None, drafter, max_length=128, method=method, row_buckets=(4,))


def prompts(name):
    # Safe prompts have no near-ties in their greedy continuation; a ragged batch is cut from the longest.
    return toy.safe_prompts(name, 4)


@pytest.mark.parametrize("name", toy.NAMES)
@pytest.mark.parametrize("method", ["ar", "recycling"])
def test_greedy_equals_naive(name, method):
    engine = decoder(name, method)
    lines = prompts(name)
    engine.reset_memory()
    outs = engine.generate(lines, max_new_tokens=NEW, ignore_eos=True)
    for prompt, out in zip(lines, outs):
        expected, margin = naive_generate(engine.config, engine.params.target, prompt, NEW)
        assert margin > 1e-2
        assert out.token_ids == expected
        assert out.finish_reason == "length"
    emitted = sum(len(out.token_ids) for out in outs)
    acceptance = emitted / sum(out.stats.rounds for out in outs)
    if method == "ar":
        assert acceptance == 1
    else:
        assert acceptance > 1.3
        assert sum(out.stats.accepted["retrieved"] for out in outs) > 20


@pytest.mark.parametrize("name", toy.NAMES)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 20, "min_p": 0.02}]
)
def test_sampled_equals_naive(name, settings):
    """With seeds whose smallest margin, noise included, is no near-tie."""
    engine, lines = decoder(name, "recycling"), prompts(name)
    found = [safe_seed(engine.config, engine.params.target, prompt, 24, **settings) for prompt in lines]
    seeds, expected = [seed for seed, _ in found], [tokens for _, tokens in found]
    engine.reset_memory()
    for _ in range(2):  # the second time the table is full of this very text
        outs = engine.generate(lines, max_new_tokens=24, ignore_eos=True, seed=seeds, **settings)
        assert [out.token_ids for out in outs] == expected
    plain = decoder(name, "ar").generate(lines, max_new_tokens=24, ignore_eos=True, seed=seeds, **settings)
    assert [out.token_ids for out in plain] == expected
    assert 24 * len(outs) / sum(out.stats.rounds for out in outs) > 1.3


@pytest.mark.parametrize("name", toy.NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_equals_solo_runs(name, temperature):
    """Case 13: prompts of 1 to 40 tokens together and alone, own seeds, rows that end at different times."""
    engine = decoder(name, "recycling")
    long = toy.sample_prompts(7, 4, 60, 60)
    lines = [line[:length] for line, length in zip(long, RAGGED)]
    settings = dict(temperature=temperature, max_new_tokens=NEW)
    engine.reset_memory()
    together = engine.generate(lines, seed=[5, 6, 7, 8], **settings)
    emitted = rounds = 0
    for i, line in enumerate(lines):
        engine.reset_memory()
        alone = engine.generate(line, seed=5 + i, **settings)
        assert alone.token_ids == together[i].token_ids
        assert alone.finish_reason == together[i].finish_reason
        emitted += len(alone.token_ids)
        rounds += together[i].stats.rounds
    assert emitted / rounds > 1.2


def test_every_accepted_length():
    """The oracle drafter with slot j spoiled accepts exactly j tokens in every full round."""
    config, params = tiny("q")
    K, prompt, count = 7, [5, 6, 7, 8], 41
    line, margin = naive_generate(config, params, prompt, count)
    assert margin > 1e-2
    engine = SpeculativeDecoder(config, params, None, Oracle(K), max_length=64, row_buckets=(4,))
    for slot in range(K + 1):
        engine.memory = oracle_memory([prompt + line], [slot])
        out = engine.generate(prompt, max_new_tokens=count - 1, ignore_eos=True)
        assert out.token_ids == line[:-1]
        histogram = out.stats.acceptance_histogram
        assert histogram[slot] >= (count - 1) // (slot + 1) - 1
        assert sum(histogram) - histogram[slot] <= 1  # the last round may be cut by the limit


def test_row_buckets_change_nothing():
    config, params = toy.load("llama")
    line = toy.safe_prompts("llama", 1)[0]
    outs = []
    for buckets in ((), (2, 4, 6)):
        engine = SpeculativeDecoder(
            config, params, None, recycling(config.vocab_size), max_length=128, row_buckets=buckets
        )
        outs.append(engine.generate(line, max_new_tokens=NEW, ignore_eos=True))
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].stats.acceptance_histogram == outs[1].stats.acceptance_histogram


@pytest.mark.parametrize("attach", ["tail", "ends"])
def test_attachment_below_a_base_draft(attach):
    """Retrieved nodes below a drafted chain: equal output, both sources accepted, base contained."""
    config, params = toy.load("llama")
    template = templates.NARROW.prefix(3)
    drafter = Graft(Oracle(3), SuccessorTable(config.vocab_size), (Stage(3, template),), template, 9, attach)
    engine = SpeculativeDecoder(config, params, None, drafter, max_length=128)
    prompt = toy.safe_prompts("llama", 1)[0]
    expected, _ = naive_generate(config, params, prompt, NEW + 16)
    table = drafter.table.init()
    engine.memory = (oracle_memory([prompt + expected], [3]), table)
    first = engine.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
    second = engine.generate(prompt, max_new_tokens=NEW, ignore_eos=True)
    for out in (first, second):
        assert out.token_ids == expected[:NEW]
        assert out.stats.mean_acceptance_length >= 3.5  # the drafted chain of 3 and the bonus
    assert second.stats.accepted["retrieved"] > 0
    assert second.stats.mean_acceptance_length > first.stats.mean_acceptance_length


def test_attention_block_changes_nothing():
    config, params = toy.load("qwen3")
    prompt = toy.sample_prompts(3, 1, 200, 200)[0]
    outs = []
    for block in (0, 64):
        spec = decode.DecodeSpec(config, recycling(config.vocab_size), 256, attention_block=block)
        engine = SpeculativeDecoder(config, params, None, spec.drafter, max_length=256)
        engine.spec = engine.programs.spec = spec
        outs.append(engine.generate(prompt, max_new_tokens=NEW, ignore_eos=True).token_ids)
    assert outs[0] == outs[1]


def test_commit_compacts_the_accepted_path():
    """Case 5: a tree after 9 cached tokens; the accepted path's cache rows equal plain decoding's."""
    config, params = tiny("q")
    from graft_jax.models import cache as kv
    from graft_jax.models import transformer
    from graft_jax.tree.structure import ancestor_mask
    from graft_jax.verify import accept

    start = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    line, margin = naive_generate(config, params, start, 14)
    assert margin > 1e-3
    text = start + line
    # Fill nine rows by one causal pass; the root is token 9.
    cache = kv.init(config, 2, 64, jnp.float32)
    causal = jnp.broadcast_to(jnp.tri(9, dtype=bool), (2, 9, 9))
    tokens9, positions9 = jnp.array([start] * 2), jnp.array([range(9)] * 2)
    out = transformer.forward(config, params, tokens9, positions9, causal, cache, jnp.zeros(2, jnp.int32))
    cache = kv.commit_chunk(cache, out.block, jnp.int32(0), jnp.ones((2, 9), bool))
    parents = jnp.array([[-1, 0, 0, 1, 2, 2]] * 2)
    depth = jnp.array([[0, 1, 1, 2, 2, 2]] * 2)
    wrong = (np.array(text[10]) + 1) % 300
    good = [text[9], wrong, text[10], 3, wrong, text[11]]
    bad = [text[9], wrong, (wrong + 1) % 300, 3, 4, 5]
    tree = toy_tree(jnp.array([good, bad]), parents, depth)
    lengths = jnp.array([9, 9])
    positions = lengths[:, None] + depth
    assert positions[0].tolist() == [9, 10, 10, 11, 11, 11]
    out = transformer.forward(config, params, tree.tokens, positions, ancestor_mask(parents, 2), cache, lengths)
    logits = transformer.logits(config, params, out.hidden)
    verdict = accept(tree, logits, sampling.make([0, 0]), lengths, jnp.ones(2, bool), 2)
    assert verdict.num_accepted.tolist() == [2, 0]
    assert verdict.path.tolist() == [[0, 2, 5], [0, 0, 0]]
    assert verdict.tokens[0].tolist() == text[10:13] and int(verdict.bonus[1]) == text[10]
    before = cache
    cache = kv.commit(cache, out.block, verdict.path, lengths)
    # Plain decoding's rows: one causal pass over twelve tokens.
    plain = kv.init(config, 1, 64, jnp.float32)
    causal = jnp.tri(12, dtype=bool)[None]
    whole = transformer.forward(
        config, params, jnp.array([text[:12]]), jnp.arange(12)[None], causal, plain, jnp.zeros(1, jnp.int32)
    )
    for layer in range(config.num_layers):
        got = np.asarray(cache.values[layer][0, :, 9:12])
        want = np.asarray(whole.block.values[layer][0, 9:12]).transpose(1, 0, 2)
        np.testing.assert_allclose(got, want, atol=1e-5)
        got = np.asarray(cache.keys[layer][0, :, :, 9:12])
        want = np.asarray(whole.block.keys[layer][0, 9:12]).transpose(1, 2, 0)
        np.testing.assert_allclose(got, want, atol=1e-5)
        for old, new in ((before.keys[layer][..., :9], cache.keys[layer][..., :9]),
                         (before.values[layer][:, :, :9], cache.values[layer][:, :, :9])):  # fmt: skip
            np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
    # The next ten tokens, one at a time from this cache, are plain decoding's.
    token, length = text[12], 12
    step = jax.jit(lambda token, length, cache: _one_step(config, params, token, length, cache))
    for expected in text[13:23]:
        token, cache = step(jnp.array([[token], [0]]), jnp.array([length, 10]), cache)
        token, length = int(token[0]), length + 1
        assert token == expected


def _one_step(config, params, tokens, lengths, cache):
    from graft_jax.models import cache as kv
    from graft_jax.models import transformer

    one = jnp.ones((2, 1, 1), bool)
    out = transformer.forward(config, params, tokens, lengths[:, None], one, cache, lengths)
    cache = kv.commit(cache, out.block, jnp.zeros((2, 1), jnp.int32), lengths)
    return transformer.logits(config, params, out.hidden)[:, 0].argmax(-1), cache


def toy_tree(tokens, parents, depth):
    from graft_jax.tree.structure import DRAFTED, ROOT, DraftTree

    return DraftTree(
        tokens=tokens, parents=parents, depth=depth, score=jnp.zeros(tokens.shape, jnp.float32),
        source=jnp.where(depth == 0, ROOT, DRAFTED), valid=jnp.ones(tokens.shape, bool),
    )  # fmt: skip
