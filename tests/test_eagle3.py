"""The EAGLE-3 head and Graft over it: files, features, losslessness with real acceptance, and the ablations."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import toy
from oracles import safe_seed

from graft_jax import engine
from graft_jax.io.drafter import load_eagle3, save_eagle3
from graft_jax.methods import Options
from graft_jax.models import eagle3
from graft_jax.models.eagle3_config import Eagle3Config, default_taps


@functools.cache
def world(name="llama"):
    config, params = toy.load(name)
    return config, params, load_eagle3(toy.FOLDER / f"{name}-eagle3", config, dtype="float32")


@functools.cache
def decoder(method, name="llama", **options):
    config, params, head = world(name)
    return engine._build(method, Options(**options), config, params, None, 256, name, head)


SETTINGS = {
    "eagle3": ("eagle3", {}),
    "graft": ("graft", {}),
    "without retrieval": ("graft", dict(retrieval=False)),
    "without pruning, at the root": ("graft", dict(prune=False)),
    "at the tail": ("graft", dict(prune=False, attach="tail")),
    "at the ends": ("graft", dict(prune=False, attach="ends")),
    "the paper's table and templates": ("graft", dict(table_order=1, template="graft", budget=20, draft_top_k=6)),
    "DDD's gate": ("graft", dict(gate_measure="beam", thresholds=(0.3, 0.2, 0.2))),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_equals_plain_decoding(setting):
    method, options = SETTINGS[setting]
    config, params, _ = world()
    prompts = toy.safe_prompts("llama", 4)
    wanted, _ = toy.greedy(config, params, prompts, 48)
    made = decoder(method, **options).generate(prompts, max_new_tokens=48, ignore_eos=True)
    assert [out.token_ids for out in made] == wanted.tolist()
    assert np.mean([out.stats.mean_acceptance_length for out in made]) > 1.3


@pytest.mark.parametrize("method", ["eagle3", "graft"])
def test_a_head_of_the_other_layout_with_eagle_3_1_norms(method):
    config, params, (head, _) = world("qwen3")
    assert head.layout == "speculators" and head.fc_norm and head.recurse_normed
    prompts = toy.safe_prompts("qwen3", 4)
    wanted, _ = toy.greedy(config, params, prompts, 48)
    made = decoder(method, "qwen3").generate(prompts, max_new_tokens=48, ignore_eos=True)
    assert [out.token_ids for out in made] == wanted.tolist()
    assert np.mean([out.stats.mean_acceptance_length for out in made]) > 1.3


@pytest.mark.parametrize("method", ["eagle3", "graft"])
def test_sampling_equals_plain_decoding_alone_and_in_a_batch(method):
    config, params, _ = world()
    prompts = toy.sample_prompts(3, 4, 5, 40)
    found = [safe_seed(config, params, prompt, 32, temperature=1.0) for prompt in prompts]
    settings = dict(max_new_tokens=32, temperature=1.0, ignore_eos=True)
    speculative = decoder(method)
    batch = speculative.generate(prompts, seed=[seed for seed, _ in found], **settings)
    for prompt, out, (seed, wanted) in zip(prompts, batch, found):
        assert out.token_ids == wanted
        assert speculative.generate(prompt, seed=seed, **settings).token_ids == wanted
    assert np.mean([out.stats.mean_acceptance_length for out in batch]) > 1.3


def test_the_head_accepts_more_than_retrieval_and_graft_more_than_its_pruned_tree():
    prompts = toy.safe_prompts("llama", 8)

    def accepted(method, **options):
        made = decoder(method, **options)
        made.reset_memory()
        stats = [made.generate(prompt, max_new_tokens=64, ignore_eos=True).stats for prompt in prompts]
        return sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats), sum(s.draft_forwards for s in stats)

    head, forwards = accepted("eagle3")
    table, _ = accepted("recycling")
    pruned, fewer = accepted("graft", retrieval=False)
    grafted, as_few = accepted("graft")
    assert head > 1.2 * table
    assert grafted > pruned
    assert fewer < forwards and as_few < forwards


def test_no_gate_closed_is_the_dynamic_tree_and_all_closed_is_retrieval():
    config, params, head = world()
    prompt = toy.safe_prompts("llama", 1)[0]
    open_gates = decoder("graft", thresholds=(-1.0, -1.0, -1.0)).generate(prompt, max_new_tokens=48, ignore_eos=True)
    dynamic = decoder("eagle3").generate(prompt, max_new_tokens=48, ignore_eos=True)
    assert open_gates.stats.acceptance_histogram[:7] == dynamic.stats.acceptance_histogram
    assert open_gates.stats.drafted == dynamic.stats.drafted
    closed = decoder("graft", thresholds=(2.0, 2.0, 2.0)).generate(prompt, max_new_tokens=48, ignore_eos=True)
    assert closed.stats.draft_forwards == closed.stats.rounds  # the first level only
    assert closed.stats.drafted["retrieved"] > 0


def test_thresholds_compile_nothing():
    made = decoder("graft")
    for _ in range(2):  # the second call starts from the table that the first one left
        made.generate(toy.safe_prompts("llama", 1)[0], max_new_tokens=8)
    before = made.programs.compile_seconds
    made.set_thresholds((0.5, 0.5, 0.5))
    made.generate(toy.safe_prompts("llama", 1)[0], max_new_tokens=8)
    assert made.programs.compile_seconds == before
    with pytest.raises(ValueError, match="must hold 3 values"):
        made.set_thresholds((0.5,))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length):
    config, params, _ = world()
    prompt = toy.safe_prompts("llama", 1)[0][:length]
    plain = decoder("ar").generate(prompt, max_new_tokens=24, ignore_eos=True)
    for method in ("eagle3", "graft"):
        assert decoder(method).generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == plain.token_ids


def test_feature_layers_in_both_numberings():
    config = dataclasses.replace(world()[0], num_layers=8)
    base = Eagle3Config.for_target(config, taps=(2, 4, 5)).to_hf()
    shapes = {"midlayer.self_attn.q_proj.weight": (config.num_heads * config.head_dim, 128)}

    def taps(**changes):
        return Eagle3Config.from_hf({**base, **changes}, config, shapes=shapes).taps

    ids = "eagle_aux_hidden_state_layer_ids"
    assert default_taps(8) == (2, 4, 5) and default_taps(32) == (2, 16, 29)
    assert taps(eagle_config={ids: [1, 3, 4]}) == (2, 4, 5)  # layer outputs, as SpecForge writes them
    assert taps(eagle_config={ids: [2, 4, 5]}) == (2, 4, 5)  # the standard layers by their inputs
    assert taps(eagle_config={}, **{ids: [1, 4, 6]}) == (1, 4, 6)  # layer inputs, as speculators writes them
    assert taps(eagle_config={}) == (2, 4, 5)
    with pytest.raises(ValueError, match="names layer 8, but the target has 8 layers"):
        taps(eagle_config={}, **{ids: [2, 4, 8]})


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_saved_and_read_again(name, tmp_path):
    config, _, (head, params) = world(name)
    save_eagle3(tmp_path / "head", head, params)
    again, read = load_eagle3(tmp_path / "head", config, dtype="float32")
    assert again == head
    jax.tree.map(np.testing.assert_array_equal, read, params)


def broken(tmp_path, change):
    """A copy of the toy head with `change(config, tensors)` applied."""
    source, folder = toy.FOLDER / "llama-eagle3", tmp_path / "broken"
    folder.mkdir()
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(config, tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WRONG = {
    "d2t is missing": lambda c, t: t.pop("d2t"),
    "d2t holds offsets, not ids": lambda c, t: t.update(d2t=t["d2t"] + np.arange(len(t["d2t"]))),
    "t2d does not mark": lambda c, t: t.update(t2d=~t["t2d"]),
    "head_dim=32, but q_proj has 64 rows for 4 heads": lambda c, t: c.update(head_dim=32),
    "made for vocab_size 300, but the target has 320": lambda c, t: c.update(vocab_size=300),
    "made for target width 96, but the target has 64": lambda c, t: c.update(target_hidden_size=96),
    r"fc.weight has shape \[64, 192\], but the configuration needs \[64, 128\]": lambda c, t: c["eagle_config"].update(
        eagle_aux_hidden_state_layer_ids=[0, 1]
    ),
    "unknown keys .*'parallel_heads'": lambda c, t: c.update(parallel_heads=2),
    "num_hidden_layers=2": lambda c, t: c.update(num_hidden_layers=2),
    "tensors are missing: midlayer.hidden_norm.weight": lambda c, t: t.pop("midlayer.hidden_norm.weight"),
    "has no place for: extra": lambda c, t: t.update(extra=np.zeros(3, np.float32)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_heads_are_refused(message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_eagle3(broken(tmp_path, WRONG[message]), world()[0], dtype="float32")


def test_the_vocabulary_map_holds_offsets():
    """Draft ids stand for target ids [3, 5, 9, 40]; the draft's arg-max is row 2: token 9."""
    config, params, _ = world()
    head = Eagle3Config.for_target(config, draft_vocab_size=4)
    weights = eagle3.init_params(head, jax.random.key(0), jnp.float32)
    weights = weights.replace(draft_to_target=jnp.array([3, 5, 9, 40], jnp.int32))
    rows = jnp.zeros_like(weights.head).at[:, 2].set(weights.norm)
    made = engine._build(
        "eagle3", Options(draft_depth=0, draft_top_k=1, budget=1), config, params, None, 64, "toy", (head, weights)
    )
    tokens, _ = made.spec.drafter._best(
        made.params.replace(drafter=weights.replace(head=rows)), jnp.ones((1, 1, head.hidden_size))
    )
    assert tokens.tolist() == [[[9]]]


def test_rope_base_is_a_stated_choice():
    config = world()[0]
    shapes = {"midlayer.self_attn.q_proj.weight": (config.num_heads * config.head_dim, 128)}
    stored = Eagle3Config.for_target(config).to_hf()

    def theta(rope, **changes):
        return Eagle3Config.from_hf({**stored, **changes}, config, shapes=shapes, rope=rope).rope.theta

    assert theta("auto", rope_theta=1e6) == 1e6 and theta("auto", rope_theta=None) == 1e4
    assert theta(10000, rope_theta=1e6) == 1e4
    with pytest.raises(ValueError, match="draft_rope='config', but there is no rope_theta"):
        theta("config", rope_theta=None)
