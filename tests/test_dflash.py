"""Block drafters: backbone and head against NumPy, slots, state, and formats."""

import dataclasses
import functools
import heapq
import json

import block_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import toy

from graft_jax.config import RopeConfig
from graft_jax.drafters.base import Params
from graft_jax.drafters.dflash import Chain, DFlash, Marginal
from graft_jax.drafters.domino import Corrected
from graft_jax.engine import SpeculativeDecoder
from graft_jax.io.block_drafter import load_block_drafter, save_block_drafter
from graft_jax.models import cache as kv
from graft_jax.models import dflash
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig, default_layer_ids

MASK = 310  # in the padding of the vocabulary, as in the released drafters
HEAD = DominoConfig(gru_size=24, rank=8, prefix=1, shift=True)
LENGTHS = (5, 0, 9)  # features of each batch row


@functools.cache
def random_drafter(domino=None, dtype="float32", sliding=False, block_size=6):
    target, target_params = toy.load("llama", jnp.dtype(dtype))
    config = DFlashConfig.for_target(
        target, num_layers=2, block_size=block_size, mask_token_id=MASK, domino=domino, head_dim=24, num_kv_heads=2
    )
    # The oracle knows plain frequencies.
    model = dataclasses.replace(config.model, rope=RopeConfig(theta=target.rope.theta))
    config = dataclasses.replace(config, model=model)
    if sliding:
        config = dataclasses.replace(config, windows=(4, 0), causal=(True, False))
    params = dflash.init_params(config, jax.random.key(3), jnp.dtype(dtype), std=0.25)
    return config, target, Params(target_params, params, jnp.zeros(1))


@functools.cache
def features(count):
    rng = np.random.default_rng(0)
    return rng.normal(size=(len(LENGTHS), 12, count * 64)).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def ready(drafter, params, rows):
    """The drafter's state after each batch row's features."""
    count = len(drafter.taps)
    state = drafter.init(params, rows.shape[0], 32, None)
    taps = tuple(jnp.split(rows, count, axis=2))
    valid = jnp.arange(rows.shape[1])[None, :] < jnp.array(LENGTHS)[:, None]
    ints = jnp.zeros(valid.shape, jnp.int32)
    return drafter.prefill(params, state, ints, ints, ints, valid, taps, None)


@functools.partial(jax.jit, static_argnums=0)
def draft(drafter, params, state, root):
    return drafter.draft(params, state, root, jnp.array(LENGTHS), jnp.ones(len(LENGTHS), bool))[0]


def oracle_rows(config, target, params, anchors):
    """Each batch row's outputs and logits of the slots that say something."""
    for row, (length, anchor) in enumerate(zip(LENGTHS, anchors)):
        outputs = block_oracle.hidden(
            config, params.drafter, params.target.embed, features(len(config.taps))[row, :length], anchor
        )[config.first_slot :]
        yield row, outputs, block_oracle.logits(target, params.target, outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sliding", [False, True])
def test_backbone_equals_numpy(dtype, sliding):
    config, target, params = random_drafter(dtype=dtype, sliding=sliding)
    drafter = DFlash(config, target, Chain(5))
    state = ready(drafter, params, features(2))
    anchors = jnp.array([7, 8, 9])
    for block in (0, 16):
        found = dflash.hidden(config, params.drafter, params.target.embed, anchors, state.cache, state.length, block)
        for row, outputs, _ in oracle_rows(config, target, params, [7, 8, 9]):
            tolerance = 2e-5 if dtype == "float32" else 6e-2
            np.testing.assert_allclose(found[row, 1:], outputs, rtol=tolerance, atol=tolerance)


def test_chain_takes_the_best_of_every_slot():
    """Case 10: slots 1 to 5 say their own positions, and all of them change with the anchor alone."""
    config, target, params = random_drafter()
    drafter = DFlash(config, target, Chain(5))
    state = ready(drafter, params, features(2))
    tree = draft(drafter, params, state, jnp.array([7, 8, 9])).tree
    for row, _, logits in oracle_rows(config, target, params, [7, 8, 9]):
        assert tree.tokens[row, 1:].tolist() == logits.argmax(axis=1).tolist()
    outputs = [
        dflash.hidden(config, params.drafter, params.target.embed, jnp.array(a), state.cache, state.length)
        for a in ([7, 8, 9], [17, 18, 19])
    ]
    assert (jnp.abs(outputs[0] - outputs[1]).max(axis=2) > 1e-3).all()


def test_without_correction_domino_is_dflash():
    """Case 10: with W2 = 0 every tree of corrected logits is that of the base logits."""
    config, target, params = random_drafter(HEAD)
    head = params.drafter.domino.replace(up=jnp.zeros_like(params.drafter.domino.up))
    params = params.replace(drafter=params.drafter.replace(domino=head))
    state = ready(DFlash(config, target, Chain(6)), params, features(2))
    root = jnp.array([7, 8, 9])
    for plain, corrected in [
        (Chain(6), Corrected(6, "chain", 0)),
        (Marginal(12), Corrected(12, "greedy-path", 0, 12)),
        (Marginal(12), Corrected(12, "path", 0, 12)),
        (Marginal(12), Corrected(12, "path", 32, 12, "full")),
    ]:
        first = draft(DFlash(config, target, plain), params, state, root).tree
        second = draft(DFlash(config, target, corrected), params, state, root).tree
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_array_equal(first.parents, second.parents)
        assert first.valid.all()
        np.testing.assert_allclose(first.score, second.score, rtol=1e-4, atol=1e-4)


SHAPES = [HEAD, DominoConfig(gru_size=24, rank=8, prefix=0, shift=False), DominoConfig(gru_size=24, rank=8, prefix=2)]


@pytest.mark.parametrize("domino", SHAPES, ids=str)
@pytest.mark.parametrize("tree", ["chain", "greedy-path", "path"])
@pytest.mark.parametrize("candidates, normaliser", [(0, "slice"), (10, "slice"), (10, "full")])
def test_corrected_trees_equal_a_heap_over_numpy(domino, tree, candidates, normaliser):
    config, target, params = random_drafter(domino)
    policy = Corrected(5 if tree == "chain" else 9, tree, candidates, 4, normaliser)
    drafter = DFlash(config, target, policy)
    state = ready(drafter, params, features(2))
    found = jax.tree.map(np.asarray, draft(drafter, params, state, jnp.array([7, 8, 9])).tree)
    kind = {"candidates": candidates, "full": normaliser == "full"}
    for row, outputs, base in oracle_rows(config, target, params, [7, 8, 9]):
        distribution = functools.cache(
            functools.partial(
                block_oracle.distribution, config, params.drafter, params.target.embed, outputs, base, **kind
            )
        )
        expected = heap(distribution, (7, 8, 9)[row], drafter, tree)
        paths = [((7, 8, 9)[row],)]
        for i in range(1, len(expected) + 1):
            paths.append((*paths[found.parents[row, i]], int(found.tokens[row, i])))
        assert paths[1:] == [path for path, _ in expected]
        np.testing.assert_allclose(found.score[row, 1 : len(paths)], [s for _, s in expected], rtol=1e-4, atol=1e-4)
        assert found.valid[row].sum() == len(paths)


def heap(distribution, anchor, drafter, tree):
    """(path, score) of the best nodes, one by one; `distribution` knows the successors of a path."""

    def best(path):
        rank = distribution(path)
        return sorted(rank, key=lambda token: (-rank[token], token))[: 1 if tree == "chain" else 4]

    greedy = (anchor,)
    while len(greedy) <= drafter.max_depth:
        greedy = (*greedy, best(greedy)[0])
    out, queue = [], []

    def push(path, score):
        if len(path) <= drafter.max_depth:
            seen = path if tree == "path" else greedy[: len(path)]
            for token in best(seen):
                heapq.heappush(queue, (-(score + distribution(seen)[token]), len(path), (*path, token)))

    push((anchor,), 0.0)
    while queue and len(out) < drafter.capacity:
        falling, _, path = heapq.heappop(queue)
        out.append((path, -falling))
        push(path, -falling)
    return out


def test_less_probable_paths_are_dropped_or_marked():
    config, target, params = random_drafter()
    state = ready(DFlash(config, target, Marginal(9)), params, features(2))
    whole = draft(DFlash(config, target, Marginal(9)), params, state, jnp.array([7, 8, 9])).tree
    floor = jnp.exp(whole.score[0, 4]) * 1.001
    dropped, marked = (
        draft(
            DFlash(config, target, Marginal(9), unlikely),
            params.replace(thresholds=floor[None]),
            state,
            jnp.array([7, 8, 9]),
        )
        for unlikely in ("drop", "mark")
    )
    assert dropped.stage[0] == 3
    np.testing.assert_array_equal(dropped.stage, (whole.score >= jnp.log(floor)).sum(axis=1) - 1)
    np.testing.assert_array_equal(dropped.tree.valid.sum(axis=1) - 1, dropped.stage)
    np.testing.assert_array_equal(marked.stage, dropped.stage)
    jax.tree.map(np.testing.assert_array_equal, marked.tree, whole)


def test_state_holds_the_features_of_every_committed_position():
    """After rounds of any acceptance the cache is what one pass over the whole text makes."""
    config, target, params = random_drafter()
    drafter = DFlash(config, target, Chain(5))
    engine = SpeculativeDecoder(target, params.target, None, drafter, max_length=128, head=(config, params.drafter))
    from graft_jax import session
    from graft_jax.engine import Request

    prompt = toy.safe_prompts("llama", 1)[0]
    run = session.Session(engine, [prompt], Request(max_new_tokens=20, ignore_eos=True))
    for _ in run.slices(32):
        pass
    state = run.state
    length = int(state.length[0])
    assert int(state.draft.length[0]) == length
    from graft_jax.models import transformer

    tokens = state.tokens[:, :length]
    out = transformer.forward(
        target, params.target, tokens, jnp.arange(length)[None], jnp.tri(length, dtype=bool)[None],
        kv.init(target, 1, 16, jnp.float32), jnp.zeros(1, jnp.int32), config.taps,
    )  # fmt: skip
    made = dflash.context(config, params.drafter, out.taps, jnp.arange(length)[None])
    for i in range(2):
        kept = state.draft.cache.keys[i][0, :, :, :length].transpose(2, 0, 1)
        np.testing.assert_allclose(kept, made.keys[i][0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("domino, count", [(None, 25), (HEAD, 29)])
def test_saved_and_loaded(tmp_path, dtype, domino, count):
    """Case 10: 3 tensors and 11 a layer, and the head's 4, under the format's names."""
    config, target, params = random_drafter(domino, dtype, sliding=domino is None)
    save_block_drafter(tmp_path / "drafter", config, params.drafter)
    tensors = safetensors.numpy.load_file(tmp_path / "drafter" / "model.safetensors") if dtype == "float32" else {}
    if tensors:
        assert len(tensors) == count
        assert tensors["layers.1.self_attn.k_proj.weight"].shape == (48, 64)
        assert not domino or tensors["prefix_gru.weight_ih_l0"].shape == (72, 64)
        assert not domino or tensors["embed_proj.0.weight"].shape == (8, 88)
    found_config, found = load_block_drafter(tmp_path / "drafter", target, dtype=dtype)
    assert found_config == config
    jax.tree.map(np.testing.assert_array_equal, found, params.drafter)
    assert jax.tree.structure(found) == jax.tree.structure(params.drafter)


def test_released_sizes_have_58_and_62_tensors():
    from graft_jax.config import ModelConfig
    from graft_jax.io.block_drafter import block_slots

    target = ModelConfig(
        model_type="qwen3", vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, qk_norm=True,
    )  # fmt: skip
    sizes = dict(num_layers=5, block_size=16, mask_token_id=151669)
    assert DFlashConfig.for_target(target, **sizes).taps == (2, 10, 18, 26, 34)
    for domino, count in ((None, 58), (DominoConfig(gru_size=1024, rank=256, prefix=1, shift=True), 62)):
        assert len(block_slots(DFlashConfig.for_target(target, domino=domino, **sizes))) == count


class TestConfig:
    def read(self, change=lambda config: None, domino=HEAD):
        config, target, _ = random_drafter(domino)
        written = json.loads(json.dumps(config.to_hf()))
        change(written)
        return DFlashConfig.from_hf(written, target), config

    def test_keys_inside_and_outside(self):
        def outside(config):
            config.update(config.pop("dflash_config"))

        assert self.read()[0] == self.read()[1]
        assert self.read(outside)[0] == self.read()[1]

    def test_contradiction(self):
        with pytest.raises(ValueError, match="mask_token_id=310 contradicts mask_token_id=5"):
            self.read(lambda config: config.update(mask_token_id=5))

    def test_missing_layer_ids_follow_the_formats_rule(self):
        """Case 3: outputs are counted, so our taps are one higher."""
        found, _ = self.read(lambda config: config["dflash_config"].pop("target_layer_ids"))
        assert found.taps == tuple(i + 1 for i in default_layer_ids(4, 2))
        assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
        assert default_layer_ids(36, 1) == [18]

    @pytest.mark.parametrize(
        "change, message",
        [
            (lambda c: c.update(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
            (lambda c: c["dflash_config"].update(selector_rank=64), "selector_rank belongs to DFlash2"),
            (lambda c: c["dflash_config"].update(projector_type="mlp"), "projector_type 'mlp'"),
            (lambda c: c["dflash_config"].update(target_layer_ids=[1, 4]), r"target_layer_ids=\[1, 4\]"),
            (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id"),
            (lambda c: c["dflash_config"].update(mask_token_id=320), "mask_token_id=320"),
            (lambda c: c["dflash_config"].pop("emb_dim"), "needs gru_hidden_dim and emb_dim"),
            (lambda c: c.update(hidden_size=32), "hidden_size 32, but the target has 64"),
            (lambda c: c.update(num_target_layers=5), "num_target_layers 5"),
            (lambda c: c.update(output_multiplier=2.0), "output_multiplier=2.0"),
            (lambda c: c.update(layer_types=["sliding_attention", "full_attention"]), "need use_sliding_window"),
            (lambda c: c.update(layer_types=["full_attention"]), "layer_types"),
            (lambda c: c.update(attention_bias=True), "attention_bias"),
            (lambda c: c["dflash_config"].update(surprise=1), "surprise"),
        ],
    )
    def test_refusals_name_the_key(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.read(change)
