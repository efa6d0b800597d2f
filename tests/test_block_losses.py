"""Losses of block drafters against NumPy, one block at a time, and what their gradients reach."""

import block_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dflash import HEAD, random_drafter

from graft_jax.models.dflash_config import DominoConfig
from graft_jax.training import block_losses

S, GAMMA = 14, 4.0
RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, 300, (2, S)).astype(np.int32)
TAPS = RNG.normal(size=(2, 2, S, 64)).astype(np.float32)
TRAINED = np.arange(S)[None, :] >= np.array([[3], [6]])
TRAINED[0, 9] = False
ANCHORS, KEEP = np.array([[3, 5, 12], [7, 8, 0]], np.int32), np.array([[1, 1, 1], [1, 1, 0]], bool)


def by_hand(config, target, params, base_weight=None):
    totals = np.zeros(3)  # corrected, base, weights
    for row in range(2):
        for anchor, keep in zip(ANCHORS[row], KEEP[row]):
            features = np.concatenate([TAPS[0, row, :anchor], TAPS[1, row, :anchor]], axis=1)
            out = block_oracle.hidden(config, params.drafter, params.target.embed, features, TOKENS[row, anchor])
            out = out[config.first_slot :]
            base = block_oracle.logits(target, params.target, out)
            for d in range(config.num_drafted):
                at = anchor + d + 1
                if not keep or at >= S or not TRAINED[row, at]:
                    continue
                label, weight = TOKENS[row, at], np.exp(-d / GAMMA)
                plain = base[d] - base[d].max()
                totals[1] += weight * (np.log(np.exp(plain).sum()) - plain[label])
                totals[2] += weight
                if config.domino:
                    path = tuple(TOKENS[row, anchor:at])
                    rank = block_oracle.distribution(config, params.drafter, params.target.embed, out, base, path)
                    totals[0] -= weight * rank[label]
    if not config.domino:
        return totals[1] / totals[2]
    return ((1 - base_weight) * totals[0] + base_weight * totals[1]) / totals[2]


def arguments(config, target, params):
    return (
        config,
        params.drafter,
        target,
        params.target,
        tuple(jnp.asarray(TAPS)),
        TOKENS,
        TRAINED,
        ANCHORS,
        KEEP,
        GAMMA,
    )


def test_dflash_loss():
    config, target, params = random_drafter()
    found = jax.jit(block_losses.dflash_loss, static_argnums=(0, 2))(*arguments(config, target, params))
    np.testing.assert_allclose(found, by_hand(config, target, params), rtol=1e-4)


@pytest.mark.parametrize("domino", [HEAD, DominoConfig(gru_size=24, rank=8)], ids=str)
def test_domino_loss(domino):
    config, target, params = random_drafter(domino)
    for weight in (0.0, 0.3):
        loss = jax.jit(block_losses.domino_loss, static_argnums=(0, 2))
        found = loss(*arguments(config, target, params), jnp.float32(weight))
        np.testing.assert_allclose(found, by_hand(config, target, params, weight), rtol=1e-4)


def test_at_full_base_weight_the_head_learns_nothing():
    config, target, params = random_drafter(HEAD)
    _, drafter, *rest = arguments(config, target, params)
    grad = jax.jit(jax.grad(lambda p, w: block_losses.domino_loss(config, p, *rest, w)))
    for weight, learns in ((1.0, False), (0.5, True)):
        grads = grad(drafter, jnp.float32(weight))
        assert all(bool(jnp.abs(g).max() > 0) == learns for g in jax.tree.leaves(grads.domino))
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("domino", [None, HEAD])
def test_no_block_sees_a_feature_at_or_after_its_anchor(domino):
    config, target, params = random_drafter(domino)

    @jax.jit
    def reach(taps):
        def block(n):
            return lambda taps: jnp.abs(
                block_losses.outputs(config, params.drafter, params.target.embed, taps, TOKENS, ANCHORS)[:, n]
            ).sum()

        return [jax.grad(block(n))(taps) for n in range(3)]

    for n, grads in enumerate(reach(tuple(jnp.asarray(TAPS)))):
        for grad in grads:
            for row in range(2):
                touched = jnp.abs(grad[row]).max(axis=1) > 0
                assert touched.tolist() == [i < ANCHORS[row, n] for i in range(S)]


def test_nothing_to_train_is_no_loss():
    config, target, params = random_drafter()
    args = list(arguments(config, target, params))
    args[6] = np.zeros_like(TRAINED)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: block_losses.dflash_loss(config, p, *args[2:])))(params.drafter)
    assert loss == 0
    assert all((g == 0).all() for g in jax.tree.leaves(grads))


def test_anchors_are_uniform_and_fit():
    trained = jnp.asarray(np.stack([TRAINED[0], np.arange(S) == 4]))
    draw = jax.jit(block_losses.sample_anchors, static_argnums=2)
    fitting = [3, 4, 5, 6, 7, 10, 11, 12]
    counts = np.zeros(S)
    for i in range(400):
        anchors, keep = (np.asarray(x) for x in draw(jax.random.key(i), trained, 4))
        assert keep.tolist() == [[True] * 4, [False] * 4]
        assert (np.diff(anchors[0]) > 0).all() and set(anchors[0]) <= set(fitting)
        counts[anchors[0]] += 1
    assert abs(counts[fitting] - 200).max() < 50


def test_curriculum_ends_where_the_ratio_says():
    found = [float(block_losses.base_anchor(jnp.int32(step), 100, 0.5)) for step in (0, 25, 50, 80)]
    assert found == [1.0, 0.5, 0.0, 0.0]
    assert float(block_losses.base_anchor(jnp.int32(50), 100)) == 0.5
