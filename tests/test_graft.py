"""Graft over a real head, round by round: containment, what is retrieved, and the cases that drafters share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import safe_seed
from test_eagle3 import decoder, world

from graft_jax import decode, engine
from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, GraftState, Stage
from graft_jax.methods import Options
from graft_jax.session import Request, Session
from graft_jax.tree.structure import RETRIEVED


def paths(tree, row=0):
    """The tokens from below the root down to every valid node, in order."""
    found = [()]
    for i in range(1, tree.tokens.shape[1]):
        found.append((*found[int(tree.parents[row, i])], int(tree.tokens[row, i])))
    return [path for i, path in enumerate(found) if i and tree.valid[row, i]]


def prefilled(made, prompt, new_tokens=64):
    session = Session(made, [[int(t) for t in prompt]], Request(max_new_tokens=new_tokens, ignore_eos=True))
    session.prefill()
    return session.state


@functools.partial(jax.jit, static_argnums=(0, 1))
def look_and_step(spec, alone, params, state):
    """The base's tree, the hybrid, and what retrieval alone would draft, from one state; and the next state."""
    root = state.tokens[jnp.arange(state.tokens.shape[0]), state.length]
    rest = (root, state.length, state.active)
    base, _ = spec.drafter.base.draft(params, state.draft.base, *rest)
    hybrid, _ = spec.drafter.draft(params, state.draft, *rest)
    recycled = alone and alone.draft(params, GraftState(None, state.draft.table, state.draft.history), *rest)[0]
    return base, hybrid, recycled, decode.decode_step(spec, params, state)


def recycling_like(drafter, stage):
    """Retrieval alone, with a stage's template and the same table."""
    template = drafter.stages[stage].template
    return Graft(Empty(), drafter.table, (Stage(0, template),), template, len(template))


@pytest.mark.parametrize("thresholds", [(0.14, 0.13, 0.49), (0.6, 0.5, 0.4), (2.0, 2.0, 2.0), (-1.0, -1.0, -1.0)])
@pytest.mark.parametrize("options", [{}, dict(attach="ends"), dict(budget=20, draft_top_k=6, template="graft")])
def test_the_kept_draft_is_contained_in_every_hybrid_tree(thresholds, options):
    made = decoder("graft", **options)
    drafter, params = made.spec.drafter, made.params.replace(thresholds=jnp.asarray(thresholds, jnp.float32))
    state, stages, retrieved = prefilled(made, toy.safe_prompts("llama", 1)[0]), set(), 0
    for _ in range(12):
        base, hybrid, _, state = look_and_step(made.spec, None, params, state)
        stage = int(hybrid.stage[0])
        kept = paths(base.tree)[: drafter.stages[stage].keep]
        found = paths(hybrid.tree)
        assert set(kept) <= set(found) and len(found) == len(set(found)) <= drafter.budget
        stages.add(stage)
        retrieved += int((hybrid.tree.source == RETRIEVED).sum())
        if stage == 0:  # node for node
            assert found == paths(base.tree)
    assert stages == {1} if thresholds[0] > 1 else 0 in stages or len(stages) > 1
    assert retrieved > 0 or thresholds[0] < 0


def test_with_all_gates_closed_the_retrieved_part_is_recyclings():
    made = decoder("graft")
    drafter, params = made.spec.drafter, made.params.replace(thresholds=jnp.full(3, 2.0))
    alone, wide = recycling_like(drafter, 1), Graft(
        Empty(), drafter.table, (Stage(0, drafter.full),), drafter.full, len(drafter.full)
    )  # fmt: skip
    state, count = prefilled(made, toy.safe_prompts("llama", 1)[0]), 0
    for _ in range(16):
        _, hybrid, recycled, after = look_and_step(made.spec, alone, params, state)
        everything = look_and_step(made.spec, wide, params, state)[2]
        tree = hybrid.tree
        assert set(paths(recycled.tree)) <= set(paths(tree))
        index = {path: i for i, path in enumerate(all_paths(tree))}
        taken = {path for path, i in index.items() if tree.valid[0, i] and tree.source[0, i] == RETRIEVED}
        assert taken <= set(paths(everything.tree))
        count, state = count + len(taken), after
    assert count > 16


def all_paths(tree, row=0):
    found = [()]
    for i in range(1, tree.tokens.shape[1]):
        found.append((*found[int(tree.parents[row, i])], int(tree.tokens[row, i])))
    return found


@pytest.mark.parametrize("method", ["eagle3", "graft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_13_ragged_batches(method, temperature):
    config, params, _ = world()
    text = toy.safe_prompts("llama", 4)
    prompts = [[int(t) for t in text[i][:n]] for i, n in enumerate((1, 3, 7, 12))]
    seeds = [
        safe_seed(config, params, np.array(p), 32, temperature=temperature)[0] if temperature else 0 for p in prompts
    ]
    settings = dict(max_new_tokens=32, temperature=temperature, ignore_eos=True)
    made, plain = decoder(method), decoder("ar")
    batch = made.generate(prompts, seed=seeds, **settings)
    for prompt, seed, row in zip(prompts, seeds, batch):
        assert row.token_ids == plain.generate(prompt, seed=seed, **settings).token_ids
        alone = made.generate(prompt, seed=seed, **settings)
        assert row.token_ids == alone.token_ids
        if method == "eagle3":  # a table is shared by the batch
            assert row.stats.acceptance_histogram == alone.stats.acceptance_histogram
    assert np.mean([row.stats.mean_acceptance_length for row in batch]) > 1.3


@pytest.mark.parametrize("method", ["eagle3", "graft"])
def test_case_11_a_head_with_fewer_positions_than_the_prompt(method):
    """Rotary angles are computed, not looked up: positions behind the head's maximum are no index error."""
    config, params, (head, weights) = world()
    short = dataclasses.replace(head, max_position=32)
    made = engine._build(method, Options(), config, params, None, 64, "toy", (short, weights))
    prompt = [int(t) for t in toy.safe_prompts("llama", 1)[0]]
    prompt = (prompt + decoder("ar").generate(prompt, max_new_tokens=60, ignore_eos=True).token_ids)[:60]
    plain = decoder("ar").generate(prompt, max_new_tokens=4, ignore_eos=True)
    out = made.generate(prompt, max_new_tokens=10, ignore_eos=True)
    assert out.token_ids == plain.token_ids and out.finish_reason == "length"
    with pytest.raises(ValueError, match="no room"):
        made.generate(prompt + [5, 6, 7, 8], max_new_tokens=1)


@pytest.mark.parametrize("method", ["eagle3", "graft"])
@pytest.mark.parametrize("off", ["plain decoding", "retrieval only"])
def test_case_17_drafting_off_for_a_while_leaves_no_stale_state(method, off):
    """After 20 tokens without the head, its next tree is the one that a fresh start on the same text drafts."""
    made = decoder(method)
    prompt = toy.safe_prompts("llama", 1)[0]
    step = jax.jit(decode.decode_step, static_argnums=0)
    state = prefilled(made, prompt)
    for _ in range(3):
        state = step(made.spec, made.params, state)
    at, params = int(state.length[0]), made.params
    budget = state.budget
    if off == "plain decoding":
        state = state.replace(budget=jnp.zeros_like(budget))
    else:
        params = params.replace(thresholds=jnp.full_like(params.thresholds, 2.0))
    while int(state.length[0]) < at + 20:
        state = step(made.spec, params, state)
    state = state.replace(budget=budget)
    text = state.tokens[0, : int(state.length[0]) + 1]
    fresh = prefilled(made, text)

    def tree(state):
        head = made.spec.drafter if method == "eagle3" else made.spec.drafter.base
        own = state.draft if method == "eagle3" else state.draft.base
        root = state.tokens[:, int(state.length[0])]
        return head.draft(made.params, own, root, state.length, state.active)[0].tree

    here, there = tree(state), tree(fresh)
    assert paths(here) == paths(there) and len(paths(here)) > 0
    np.testing.assert_allclose(here.score, there.score, atol=1e-3)
    rest, again = state, fresh
    for _ in range(4):
        rest, again = step(made.spec, made.params, rest), step(made.spec, made.params, again)
    length = min(int(rest.length[0]), int(again.length[0]))
    np.testing.assert_array_equal(rest.tokens[0, : length + 1], again.tokens[0, : length + 1])
    if method == "eagle3":
        assert int(rest.length[0]) == int(again.length[0])
    assert int(rest.length[0]) - len(text) >= 4 * 0.3
