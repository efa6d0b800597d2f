"""The toy world is what tests of drafters and trees think it is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import EOS, FOLDER, NAMES, NUM_TOKENS, SEP, VOCAB_SIZE, Language, facts, load, plain
from toy.language import CLOSES, OPENS

from graft_jax.io.checkpoint import load_target

CHAIN_4 = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


@pytest.fixture(scope="module", params=NAMES)
def toy(request):
    """(name, config, params, greedy lines [6, 160], their margins)."""
    config, params = load(request.param)
    lines, margins = plain.greedy(config, params, plain.safe_prompts(request.param, 6), 160)
    return request.param, config, params, lines, margins


@pytest.fixture(scope="module")
def texts():
    return plain.language().rows(np.random.default_rng(7), 150, 256)[0]


def test_language_is_fixed_by_its_seeds():
    first = Language(0).document(np.random.default_rng(1))
    assert first == Language(0).document(np.random.default_rng(1))
    assert first != Language(0).document(np.random.default_rng(2))
    assert first != Language(1).document(np.random.default_rng(1))


def test_language_uses_every_token_and_no_other(texts):
    assert set(texts.ravel().tolist()) == set(range(NUM_TOKENS))


def test_no_word_begins_another_of_its_kind():
    for words in Language(0).words.values():
        for i, word in enumerate(words):
            assert not any(other[: len(word)] == word for j, other in enumerate(words) if i != j)


def test_brackets_close_as_they_opened(texts):
    for line in texts.tolist():
        waiting = []
        for token in line:
            assert not (token == EOS and waiting)
            if token in OPENS:
                waiting.append(OPENS.index(token))
            elif token in CLOSES:
                assert waiting.pop() == CLOSES.index(token)


def test_prompts_have_the_lengths_asked_for():
    prompts = plain.sample_prompts(3, 20, 16, 20)
    assert prompts == plain.sample_prompts(3, 20, 16, 20)
    assert {len(prompt) for prompt in prompts} == {16, 17, 18, 19, 20}
    assert all(SEP in prompt and EOS not in prompt for prompt in prompts)


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_small_and_in_hugging_face_form(name):
    size = (FOLDER / name / "model.safetensors").stat().st_size
    assert 300_000 < size < 1_000_000
    config = json.loads((FOLDER / name / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["eos_token_id"]) == (name, VOCAB_SIZE, [1, 2])


@pytest.mark.parametrize("name", NAMES)
def test_both_dtypes_hold_the_same_weights(name):
    _, exact = load(name)
    _, half = load(name, jnp.bfloat16)
    np.testing.assert_array_equal(exact.layers[0].gate, half.layers[0].gate.T.astype(jnp.float32))
    np.testing.assert_array_equal(exact.embed, half.embed.astype(jnp.float32))


@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_the_folder_alike(name):
    config, params = load(name)
    library_config, library_params, _ = load_target(FOLDER / name, dtype="float32")
    assert dataclasses.replace(library_config, num_tokens=NUM_TOKENS) == config
    jax.tree.map(np.testing.assert_array_equal, params, library_params)


def test_loss_is_the_stored_one_and_padding_rows_are_traps(toy):
    """The loss is near the entropy; without the mask, ids that no token has would often win."""
    name, config, params, lines, _ = toy
    unmasked = dataclasses.replace(config, num_tokens=config.vocab_size)
    tokens, nats = plain.language().rows(np.random.default_rng(11), 16, 193)
    logits = plain.causal_logits(unmasked, params, tokens[:, :-1])
    assert (logits.argmax(-1) >= NUM_TOKENS).mean() > 0.1
    assert (lines < NUM_TOKENS).all()
    own = logits[..., :NUM_TOKENS]
    loss = float(optax.softmax_cross_entropy_with_integer_labels(own, tokens[:, 1:]).mean())
    gap = facts(name)["loss"] - facts(name)["entropy"]
    assert abs(loss - float(nats[:, 1:].mean()) - gap) < 0.03
    assert 0 < gap < 0.2


def test_greedy_text_does_not_loop(toy):
    _, _, _, lines, _ = toy
    assert min(plain.distinct_4grams(line.tolist()) for line in lines) > 0.6
    assert not np.isin(lines, [EOS, SEP]).any()


def test_full_recomputation_and_cache_agree_on_a_safe_prompt(toy):
    name, config, params, _, margins = toy
    smallest = plain.min_margin(config, params, plain.safe_prompts(name, 1)[0], 32)
    assert smallest > 1e-2
    assert abs(smallest - margins[0, :32].min()) < 1e-3
    assert margins[:, :64].min() > 1e-2


def test_acceptance_is_graded(toy, texts):
    """One token of context predicts some, three predict more, and neither comes near everything."""
    _, _, _, lines, _ = toy
    tables = [plain.successor_table(texts, order) for order in (3, 2, 1)]
    one = plain.table_acceptance(lines, tables[2:], CHAIN_4)
    three = plain.table_acceptance(lines, tables, CHAIN_4)
    assert 1.4 < one < 1.9
    assert one + 0.15 < three < 3.0


def test_table_acceptance_counts_by_hand():
    table = {(1,): [2, 3], (2,): [4]}
    # From 1: 2 and 4 are drafted and right, 9 is the bonus; from 9 and 1: only bonuses.
    line = np.array([[0, 0, 0, 1, 2, 4, 9, 1, 5]])
    assert plain.table_acceptance(line, [table], ((0,), (0, 0))) == 5 / 3
    assert plain.table_acceptance(line, [table], ()) == 1
