"""Losses of block drafters against NumPy, one block at a time, and what their gradients reach."""

import block_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dflash import HEAD, random_drafter

from graft_jax.models import domino, transformer
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
        *map(jnp.asarray, (TOKENS, TRAINED, ANCHORS, KEEP)),
        GAMMA,
    )


def test_dflash_loss():
    config, target, params = random_drafter()
    found = jax.jit(block_losses.block_loss, static_argnums=(0, 2))(*arguments(config, target, params))[0]
    np.testing.assert_allclose(found, by_hand(config, target, params), rtol=1e-4)


@pytest.mark.parametrize("head", [HEAD, DominoConfig(gru_size=24, rank=8)], ids=str)
def test_domino_loss(head):
    config, target, params = random_drafter(head)
    for weight in (0.0, 0.3):
        loss = jax.jit(block_losses.block_loss, static_argnums=(0, 2))
        found, _ = loss(*arguments(config, target, params), jnp.float32(weight))
        np.testing.assert_allclose(found, by_hand(config, target, params, weight), rtol=1e-4)


def plain_loss(config, params, target_config, target, taps, tokens, mask, anchors, keep, gamma, base_weight):
    """All logits at once, differentiated by JAX."""
    labels, weights = block_losses.targets(tokens, mask, anchors, keep, config.num_drafted, gamma)
    hidden = block_losses.outputs(config, params, target.embed, taps, tokens, anchors)
    shape = hidden.shape
    base = transformer.logits(target_config, target, hidden.reshape(shape[0], -1, shape[-1])).reshape(*shape[:3], -1)
    share = weights / (weights.sum() + 1e-6)

    def entropy(logits):
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.where(weights > 0, share * (jax.nn.logsumexp(logits, axis=-1) - chosen), 0.0).sum()

    if config.domino is None:
        return entropy(base)
    state = jnp.zeros((*anchors.shape, config.domino.gru_size))
    token, final = jnp.take_along_axis(tokens, anchors, axis=1), []
    for d in range(config.num_drafted):
        state = domino.advance(params.domino, target.embed, state, token)
        low = domino.compress(params.domino, hidden[:, :, d] @ params.domino.hidden_down, state)
        delta = domino.correction(params.domino, low)
        final.append(base[:, :, d] + (delta if d >= config.domino.prefix else 0.0))
        token = labels[:, :, d]
    return (1 - base_weight) * entropy(jnp.stack(final, axis=2)) + base_weight * entropy(base)


@pytest.mark.parametrize("head", [None, HEAD])
def test_gradients_equal_those_of_all_logits_at_once(head, monkeypatch):
    monkeypatch.setattr(block_losses, "ROWS", 8)  # several chunks of logits
    monkeypatch.setattr(block_losses, "BLOCKS", 2)  # and of blocks
    config, target, params = random_drafter(head)
    _, drafter, *rest = arguments(config, target, params)
    weight = jnp.float32(0.3)
    (found, metrics), gradient = jax.jit(
        jax.value_and_grad(lambda p: block_losses.block_loss(config, p, *rest, weight), has_aux=True)
    )(drafter)
    expected, wanted = jax.jit(jax.value_and_grad(lambda p: plain_loss(config, p, *rest, weight)))(drafter)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert metrics.labels[0] == 5 and (metrics.labels[1:] <= metrics.labels[:-1]).sum() >= 1


@pytest.mark.parametrize("head", [None, HEAD])
def test_packed_texts_are_as_texts_alone(head):
    """Two texts in one row against each in a row of its own."""
    config, target, params = random_drafter(head)
    drafter, weight, cut = params.drafter, jnp.float32(0.3), 8
    taps = tuple(jnp.asarray(x) for x in TAPS)

    @jax.jit
    def run(tokens, mask, anchors, keep, taps, segments):
        parts = (config, drafter, target, params.target, taps, tokens, mask, anchors, keep, GAMMA, weight, segments)
        return block_losses.block_loss(*parts)

    apart = []
    for row, length in ((0, cut), (1, S)):
        mask = TRAINED[row : row + 1, :length]
        anchors, keep = np.array([[3, 5]]) if row == 0 else np.array([[7, 8]]), np.ones((1, 2), bool)
        parts = (tuple(x[row : row + 1, :length] for x in taps), TOKENS[row : row + 1, :length], mask)
        apart.append(run(*map(jnp.asarray, (*parts[1:], anchors, keep)), parts[0], None))
    joined = tuple(jnp.concatenate([x[:1, :cut], x[1:]], axis=1) for x in taps)
    line = lambda x: np.concatenate([x[:1, :cut], x[1:]], axis=1)
    segments = np.array([[1] * cut + [2] * S])
    anchors, keep = np.array([[3, 5, cut + 7, cut + 8]]), np.ones((1, 4), bool)
    packed, metrics = run(
        *map(jnp.asarray, (line(TOKENS), line(TRAINED), anchors, keep)), joined, jnp.asarray(segments)
    )
    np.testing.assert_array_equal(metrics.labels, apart[0][1].labels + apart[1][1].labels)
    decay = np.exp(-np.arange(config.num_drafted) / GAMMA)
    mass = [float((decay * np.asarray(m.labels)).sum()) for _, m in apart]
    expected = sum(m * float(loss) for m, (loss, _) in zip(mass, apart)) / sum(mass)
    np.testing.assert_allclose(packed, expected, rtol=1e-4)


def test_at_full_base_weight_the_head_learns_nothing():
    config, target, params = random_drafter(HEAD)
    _, drafter, *rest = arguments(config, target, params)
    grad = jax.jit(jax.grad(lambda p, w: block_losses.block_loss(config, p, *rest, w)[0]))
    for weight, learns in ((1.0, False), (0.5, True)):
        grads = grad(drafter, jnp.float32(weight))
        assert all(bool(jnp.abs(g).max() > 0) == learns for g in jax.tree.leaves(grads.domino))
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("head", [None, HEAD])
def test_no_block_sees_a_feature_at_or_after_its_anchor(head):
    config, target, params = random_drafter(head)

    @jax.jit
    def reach(taps):
        def block(n):
            return lambda taps: jnp.abs(
                block_losses.outputs(
                    config, params.drafter, params.target.embed, taps, *map(jnp.asarray, (TOKENS, ANCHORS))
                )[:, n]
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
    args[6] = jnp.zeros_like(args[6])
    loss, grads = jax.jit(jax.value_and_grad(lambda p: block_losses.block_loss(config, p, *args[2:])[0]))(
        params.drafter
    )
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
