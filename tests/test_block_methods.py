"""The six block methods in the toy world: losslessness with real acceptance, alignment, and the papers' ladder."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import safe_seed
from tiny_checkpoints import write_tokenizer

from graft_jax import cli, engine, methods
from graft_jax.drafters.base import Params
from graft_jax.drafters.dflash import Chain, DFlash, Marginal, Slots
from graft_jax.drafters.domino import Corrected
from graft_jax.io.block_drafter import load_block_drafter, load_drafter
from graft_jax.methods import Options
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.session import Request, Session

# Method: the drafter whose weights it takes here.
METHODS = {
    "dflash": "dflash", "domino": "domino", "ddtree": "dflash", "dominotree": "domino", "graft-dflash": "dflash",
    "graft-dominotree": "domino",
}  # fmt: skip
RAGGED = (1, 3, 7, 12)


@functools.cache
def world(name):
    """Target's configuration and parameters, and a drafter's."""
    config, params = toy.load("llama")
    return config, params, load_block_drafter(toy.FOLDER / name, config, dtype="float32")


@functools.cache
def decoder(method, **options):
    config, params, head = world(METHODS[method])
    return engine._build(method, Options(**options), config, params, None, 256, "toy", head)


@functools.cache
def ragged():
    """Prompts of 1 to 12 tokens, seeds without near-ties at temperature 1, and what plain decoding says."""
    config, params = toy.load("llama")
    prompts = [line[:n] for line, n in zip(toy.sample_prompts(3, 4, 20, 20), RAGGED)]
    found = [safe_seed(config, params, prompt, 40, temperature=1.0) for prompt in prompts]
    return prompts, [seed for seed, _ in found], [tokens for _, tokens in found]


def acceptance(outs):
    return sum(out.stats.new_tokens for out in outs) / sum(out.stats.rounds for out in outs)


@pytest.mark.parametrize("method", METHODS)
class TestLossless:
    def test_greedy(self, method):
        config, params, _ = world(METHODS[method])
        prompts = toy.safe_prompts("llama", 4)
        wanted, _ = toy.greedy(config, params, prompts, 64)
        made = decoder(method)
        made.reset_memory()
        outs = made.generate(prompts, max_new_tokens=64, ignore_eos=True)
        assert [out.token_ids for out in outs] == wanted.tolist()
        assert acceptance(outs) > 1.3
        assert sum(out.stats.accepted["drafted"] for out in outs) > 20
        if method == "graft-dflash":
            assert sum(out.stats.accepted["retrieved"] for out in outs) > 5

    def test_sampled_alone_and_in_a_ragged_batch(self, method):
        """Case 13: prompts of 1 to 12 tokens with a seed each; and a batch whose rows end at different times."""
        prompts, seeds, wanted = ragged()
        settings = dict(max_new_tokens=40, temperature=1.0)
        made = decoder(method)
        made.reset_memory()
        batch = made.generate(prompts, seed=seeds, ignore_eos=True, **settings)
        assert [out.token_ids for out in batch] == wanted
        assert acceptance(batch) > 1.3
        for prompt, seed, tokens in zip(prompts, seeds, wanted):
            assert made.generate(prompt, seed=seed, ignore_eos=True, **settings).token_ids == tokens
        stop = wanted[1][9]
        plain = made.config
        made.config = dataclasses.replace(plain, eos_token_ids=(stop,))
        try:
            ended = made.generate(prompts, seed=seeds, **settings)
        finally:
            made.config = plain
        cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in wanted]
        assert [out.token_ids for out in ended] == cut
        assert len({len(tokens) for tokens in cut}) > 1

    def test_on_the_command_line(self, method, capsys, tmp_path):
        prompt = ",".join(map(str, toy.safe_prompts("llama", 1)[0]))
        shutil.copytree(toy.FOLDER / "llama", tmp_path / "llama")
        write_tokenizer(tmp_path / "llama")  # so that padding rows are known to be some
        status = cli.main([
            "generate", "--model", str(tmp_path / "llama"), "--drafter", str(toy.FOLDER / METHODS[method]),
            "--method", method, "--prompt-ids", prompt, "--dtype", "float32", "--max-length", "256",
            "--max-new-tokens", "60", "--ignore-eos", "--compare", "--json",
        ])  # fmt: skip
        report = json.loads(capsys.readouterr().out)
        assert status == 0 and report["compare"]["equal"] is True
        assert report["results"][0]["stats"]["mean_acceptance_length"] > 1.3


LADDER = {
    "dflash": ("dflash", {}),
    "ddtree": ("ddtree", dict(budget=16)),
    "domino": ("domino", {}),
    "marginal": ("dominotree", dict(scoring="marginal", budget=16)),
    "greedy-path": ("dominotree", dict(scoring="greedy-path", budget=16)),
    "path": ("dominotree", dict(budget=16)),
}


def test_acceptance_orders_as_in_the_papers():
    """Trees accept more than chains, and corrected trees the more, the more of a node's own path they know."""
    prompts = toy.sample_prompts(11, 16, 16, 48)
    found = {}
    for name, (method, options) in LADDER.items():
        made = decoder(method, **options)
        batches = [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
        found[name] = acceptance([
            out for batch in batches for out in made.generate(batch, max_new_tokens=128, ignore_eos=True)
        ])  # fmt: skip
    for less, more in (
        ("dflash", "ddtree"), ("domino", "path"), ("marginal", "greedy-path"), ("greedy-path", "path"),
    ):  # fmt: skip
        assert found[less] < 0.98 * found[more], found


@functools.partial(jax.jit, static_argnums=0)
def drafts(drafter, params, taps, lengths, root):
    """One draft a row, after as many features as each has tokens before its root."""
    B, T = taps[0].shape[:2]
    state = drafter.init(params, B, T + 8, None)
    valid = jnp.arange(T)[None, :] < lengths[:, None]
    ints = jnp.zeros((B, T), jnp.int32)
    state = drafter.prefill(params, state, ints, ints, ints, valid, taps, None)
    return drafter.draft(params, state, root, lengths, jnp.ones(B, bool))[0].tree.tokens[:, 1:]


@pytest.mark.parametrize("name", ["dflash", "domino"])
def test_every_slot_says_the_token_of_its_own_place(name):
    """Case 10: what slot d drafts is the token at root + d + 1, far more often than any near it."""
    config, target, (drafter_config, weights) = world(name)
    prompts = toy.sample_prompts(21, 48, 30, 30)
    lines = np.concatenate([prompts, toy.greedy(config, target, prompts, 70)[0]], axis=1).astype(np.int32)
    lengths = np.random.default_rng(0).integers(20, 80, len(lines))
    _, taps = tapped(config, target, drafter_config.taps, jnp.asarray(lines))
    policy = Chain(7) if name == "dflash" else Corrected(8, "chain", 0)
    drafter = DFlash(drafter_config, config, policy)
    rows = np.arange(len(lines))
    tokens = drafts(
        drafter, Params(target, weights, jnp.zeros(1)), taps, jnp.asarray(lengths), jnp.asarray(lines[rows, lengths])
    )
    for slot in range(tokens.shape[1]):
        matches = {
            shift: np.mean(np.asarray(tokens[:, slot]) == lines[rows, lengths + slot + 1 + shift])
            for shift in (-2, -1, 0, 1, 2)
        }
        others = [share for shift, share in matches.items() if shift]
        assert matches[0] > 2 * max(others), (slot, matches)
        assert matches[0] > (0.3 if slot < 3 else 0.1), (slot, matches)


@functools.partial(jax.jit, static_argnums=(0, 2))
def tapped(config, params, taps, tokens):
    from graft_jax.models import cache as kv
    from graft_jax.models import transformer

    B, T = tokens.shape
    out = transformer.forward(
        config, params, tokens, jnp.broadcast_to(jnp.arange(T), (B, T)),
        jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T)), kv.init(config, B, 1, jnp.float32),
        jnp.zeros(B, jnp.int32), taps,
    )  # fmt: skip
    return out.hidden, out.taps


POLICIES = {
    "dflash": lambda: Chain(7),
    "ddtree": lambda: Marginal(16),
    "domino": lambda: Corrected(8, "chain", 0),
    "domino slice": lambda: Corrected(8, "chain", 64),
    "greedy-path": lambda: Corrected(16, "greedy-path"),
    "path": lambda: Corrected(16, "path"),
}


@functools.cache
def built(name):
    """A policy on the toy weights: (function of slots and root, the drafter's configuration)."""
    _, target, (config, weights) = world("dflash" if name == "dflash" else "domino")
    policy, params = POLICIES[name](), Params(target, weights)

    @jax.jit
    def make(params, slots, root):
        return policy(config, params, slots, root, jnp.ones(root.shape, bool)).tree

    return lambda slots, root: jax.tree.map(np.asarray, make(params, slots, root)), config


ROWS = 9  # one batch shape for both tests: one more than the slots of a shifted block


@pytest.mark.parametrize("name", POLICIES)
def test_a_spoiled_slot_ends_the_path_there(name):
    """Slots that are sure of an oracle's tokens, one of them spoiled: exactly the tokens before it are accepted."""
    make, config = built(name)
    D = config.num_drafted
    wanted = np.array([17, 250, 3, 3, 299, 90, 41, 8][:D])
    said = np.tile(wanted, (ROWS, 1))  # row j has slot j spoiled; those behind have none
    said[np.arange(D), np.arange(D)] += 1
    logits = np.zeros((ROWS, D, config.model.vocab_size), np.float32)
    np.put_along_axis(logits, said[:, :, None], 500.0, axis=2)  # more than any correction
    tree = make(Slots(jnp.zeros((ROWS, D, config.model.hidden_size)), jnp.asarray(logits)), jnp.full(ROWS, 9))
    for row in range(ROWS):
        at, depth = 0, 0
        while depth < D:
            below = (tree.parents[row] == at) & (tree.tokens[row] == wanted[depth]) & tree.valid[row]
            if not below.any():
                break
            (at,) = np.flatnonzero(below)
            depth += 1
            assert tree.depth[row, at] == depth
        assert depth == min(row, D)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_trees_are_trees(name, kind):
    """Closed under prefixes, no token twice under a node, at most the budget, the root's best child first."""
    make, config = built(name)
    D, V, M = config.num_drafted, config.model.vocab_size, config.model.hidden_size
    rng = np.random.default_rng(len(kind))
    logits = {"flat": 1.0, "peaked": 8.0, "tied": 2.0}[kind] * rng.normal(size=(ROWS, D, V))
    logits = jnp.asarray(np.round(logits) if kind == "tied" else logits, jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(ROWS, D, M)), jnp.float32)
    tree = make(Slots(hidden, logits), jnp.asarray(rng.integers(0, 300, ROWS)))
    for row in range(ROWS):
        nodes = np.flatnonzero(tree.valid[row])[1:]
        parents = tree.parents[row, nodes]
        assert (parents < nodes).all() and tree.valid[row, parents].all()
        assert (tree.depth[row, nodes] == tree.depth[row, parents] + 1).all() and tree.depth[row, nodes].max() <= D
        assert len(set(zip(parents, tree.tokens[row, nodes]))) == len(nodes) == POLICIES[name]().budget
        assert (np.diff(tree.score[row, nodes]) <= 0).all()
        assert tree.tokens[row, 1] == np.argmax(logits[row, 0])  # the first slot is never corrected here


@pytest.mark.parametrize("method", ["dominotree", "graft-dflash"])
def test_case_11_the_end_of_the_cache(method):
    """A prompt of 60 in a cache of 64, with trees of 16; and a drafter whose config names 32 positions."""
    config, params, (drafter_config, weights) = world(METHODS[method])
    model = dataclasses.replace(drafter_config.model, max_position=32)
    head = dataclasses.replace(drafter_config, model=model), weights
    made = engine._build(method, Options(budget=16), config, params, None, 64, "toy", head)
    line = toy.sample_prompts(5, 1, 64, 64)[0]
    out = made.generate(line[:60], max_new_tokens=10, ignore_eos=True)
    assert out.token_ids == toy.greedy(config, params, [line[:60]], 4)[0][0].tolist()
    assert out.finish_reason == "length"
    again = made.generate(line[:40], max_new_tokens=24, ignore_eos=True)
    assert again.token_ids == toy.greedy(config, params, [line[:40]], 24)[0][0].tolist()
    with pytest.raises(ValueError, match="64 tokens.*max_length=64"):
        made.generate(line)


@pytest.mark.parametrize("method", METHODS)
def test_case_17_drafting_switched_off_for_a_while(method):
    """After 20 plain tokens inside a generation the rounds are those of one that starts there."""
    made = decoder(method)
    prompt = toy.safe_prompts("llama", 2)[1]
    made.reset_memory()
    session = Session(made, [prompt], Request(max_new_tokens=96, ignore_eos=True))
    budget = None
    for _ in session.slices(1):
        state = session.state
        assert state is not None
        done = int(session.lengths[0]) - len(prompt)
        if budget is None and done >= 12:
            budget, off = state.budget, done
            session.state = state.replace(budget=jnp.zeros_like(budget))
        elif budget is not None and off is not None and done >= off + 20:
            assert done == off + 20
            before = np.array(state.statistics.histogram[0])
            text, left, off = session.tokens[0, : session.lengths[0]].tolist(), 96 - done, None
            table = session.decoder.spec.drafter.memory(jax.tree.map(jnp.copy, state.draft))
            session.state = state.replace(budget=budget)
    after = (np.array(session.state.statistics.histogram[0]) - before).tolist()
    made.memory = table
    fresh = made.generate(text, max_new_tokens=left, ignore_eos=True)
    assert session.tokens[0, len(text) : session.lengths[0]].tolist() == fresh.token_ids
    if not method.startswith("graft"):  # a prompt's rows enter the table otherwise than a round's
        assert fresh.stats.acceptance_histogram == after
    assert fresh.stats.mean_acceptance_length > 1.3


def test_case_3_layers_are_counted_by_their_outputs():
    """Outputs of layers 1, 4 and 6 are transformers' hidden_states[2], [5] and [7]."""
    config, _, (drafter_config, _) = world("dflash")
    target = dataclasses.replace(config, num_layers=8)
    written = drafter_config.to_hf() | {"num_target_layers": 8}

    def taps(ids):
        return DFlashConfig.from_hf(
            written | {"dflash_config": written["dflash_config"] | {"target_layer_ids": ids}}, target
        ).taps

    assert taps([1, 4, 6]) == (2, 5, 7)
    with pytest.raises(ValueError, match="target_layer_ids=.*8"):
        taps([1, 8])


def test_settings_compile_nothing_new():
    """One set of programs, whatever lengths, temperatures, budgets and thresholds come; and no callback in it."""
    made = decoder("graft-dominotree")
    line = toy.safe_prompts("llama", 1)[0]
    for _ in range(2):
        made.generate(line, max_new_tokens=8)
    before, count = made.programs.compile_seconds, len(made.programs.compiled)
    lengths = set()
    for i in range(6):
        made.set_thresholds((0.15 * i,))
        out = made.generate(
            line[: 5 + i], max_new_tokens=9 + i, temperature=0.5 * (i % 3), seed=i, budget=1 + i, ignore_eos=True
        )
        lengths.add(out.stats.mean_acceptance_length)
    made.set_thresholds(methods.get("graft-dominotree").build(_context("domino"), Options()).thresholds)
    assert made.programs.compile_seconds == before and len(made.programs.compiled) == count
    assert len(lengths) > 2
    for program in made.programs.compiled.values():
        assert "callback" not in program.as_text()


def _context(name):
    config, _, head = world(name)
    return methods.Context(config, head[0])


def test_thresholds_move_slots_to_retrieval():
    """At 0 the drafted tree stays whole; above 1 all slots are retrieved where the table knows enough."""
    made = decoder("graft-dominotree")
    config, params, _ = world("domino")
    prompts = toy.safe_prompts("llama", 4)
    wanted, _ = toy.greedy(config, params, prompts, 64)
    shares = []
    for threshold in (0.0, 0.3, 1.1):
        made.reset_memory()
        made.set_thresholds((threshold,))
        outs = made.generate(prompts, max_new_tokens=64, ignore_eos=True)
        assert [out.token_ids for out in outs] == wanted.tolist()
        assert acceptance(outs) > 1.3
        drafted, retrieved = (sum(out.stats.drafted[kind] for out in outs) for kind in ("drafted", "retrieved"))
        shares.append(retrieved / (drafted + retrieved))
    made.set_thresholds(methods.get("graft-dominotree").build(_context("domino"), Options()).thresholds)
    # What was drafted too counts as drafted, so few retrieved nodes are accepted as such.
    assert sum(out.stats.accepted["retrieved"] for out in outs) > 0
    assert shares[0] == 0 and shares[0] < shares[1] < shares[2] and shares[2] > 0.5


def test_options_reach_the_drafter():
    context = _context("domino")

    def policy(method, **options):
        return methods.get(method).build(context, Options(**options)).drafter.policy

    assert policy("dflash") == Chain(7) and policy("dflash", budget=3) == Chain(3)
    assert policy("domino", block_size=4) == Corrected(4, "chain", 0)
    assert policy("dominotree", budget=16) == Corrected(16, "path", 64, 8, "slice")
    assert policy("dominotree", scoring="greedy-path", candidates=0, normaliser="full", budget=12) == Corrected(
        12, "greedy-path", 0, 8, "full"
    )
    assert policy("dominotree", scoring="marginal") == Marginal(7)
    large = dataclasses.replace(context, small=False)
    assert methods.get("dominotree").build(large, Options()).drafter.policy == Corrected(16, "path", 64)
    grafted = methods.get("graft-dflash").build(context, Options(budget=12, thresholds=(0.5,)))
    assert grafted.thresholds == (0.5,) and grafted.drafter.attach == "tail"
    assert [(stage.keep, len(stage.template)) for stage in grafted.drafter.stages] == [(n, 12 - n) for n in range(9)]
    assert methods.get("graft-dflash").build(context, Options(retrieval=False)).drafter.unlikely == "drop"


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("dflash", dict(block_size=9), "block_size=9 is above the drafter's 8"),
        ("dflash", dict(block_size=1), "block_size=1"),
        ("domino", dict(budget=9), "budget=9: the drafter's block says 8"),
        ("domino", dict(candidates=-1), "candidates=-1"),
        ("dominotree", dict(scoring="best"), "scoring='best'"),
        ("dominotree", dict(normaliser="none"), "normaliser='none'"),
        ("ddtree", dict(scoring="path"), "method 'ddtree' is scoring 'marginal'"),
        ("graft-dflash", dict(thresholds=(0.1, 0.2)), "thresholds="),
    ],
)
def test_wrong_options_are_named(method, options, message):
    with pytest.raises(ValueError, match=message):
        methods.get(method).build(_context("domino"), Options(**options))


class TestDrafterFolders:
    def load(self, folder, method, target=None):
        config = toy.load("llama")[0] if target is None else target
        return load_drafter(toy.FOLDER / folder, config, dtype="float32", kinds=methods.get(method).heads)

    def test_kinds_are_recognised(self):
        for folder, method in (("dflash", "ddtree"), ("domino", "dominotree"), ("llama-eagle3", "graft")):
            config, _ = self.load(folder, method)
            assert config.kind in methods.get(method).heads
        assert self.load("domino", "dflash")[0].domino is not None  # its backbone alone

    @pytest.mark.parametrize(
        "folder, method, message",
        [
            ("dflash", "domino", "dflash' is a DFlash drafter; wanted: a Domino drafter"),
            ("llama-eagle3", "ddtree", "is an EAGLE-3 head; wanted: a DFlash drafter or a Domino drafter"),
            ("domino", "graft", "is a Domino drafter; wanted: an EAGLE-3 head"),
        ],
    )
    def test_another_kind_is_refused(self, folder, method, message):
        with pytest.raises(ValueError, match=message):
            self.load(folder, method)

    def test_another_target_is_refused_with_both_numbers(self):
        config = toy.load("llama")[0]
        for change, message in (
            (dict(hidden_size=96), "hidden_size 64, but the target has 96"),
            (dict(vocab_size=300), "vocab_size 320, but the target has 300"),
            (dict(num_layers=6), "num_target_layers 4, but the target has 6"),
        ):
            with pytest.raises(ValueError, match=message):
                self.load("dflash", "dflash", dataclasses.replace(config, **change))

    def test_another_method_of_a_loaded_decoder(self):
        assert decoder("ddtree").with_method("dflash").spec.drafter.policy == Chain(7)
        with pytest.raises(ValueError, match="'domino' needs a Domino drafter; .* with a DFlash drafter"):
            decoder("ddtree").with_method("domino")
