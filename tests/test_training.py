"""The training-time-test loss against a loop over rows and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import toy

from graft_jax.models import eagle3, transformer
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import attend
from graft_jax.training import features, losses, step


def setup(mask):
    config, target = toy.load("llama")
    head = Eagle3Config.for_target(config, draft_vocab_size=260)
    params = eagle3.init_params(head, jax.random.key(1), jnp.float32, std=0.2)
    params = params.replace(draft_to_target=jnp.arange(260, dtype=jnp.int32) + 20)
    tokens = jnp.asarray(toy.Language(0).rows(np.random.default_rng(0), 1, 10)[0])
    return config, target, head, params, features.extract(config, target, head.taps, tokens, jnp.asarray([mask]))


def slow_loss(config, target, head, params, batch, steps):
    """Row by row as drafting does it: true features up to row i, then the head's own output."""
    S = batch.tokens.shape[1]
    teacher = transformer.logits(config, target, batch.hidden)[0]
    fused = eagle3.fuse(head, params, batch.taps)
    total, counts = 0.0, []
    for j in range(steps):
        terms = []
        for i in range(S - j - 2):
            if not bool(batch.mask[0, i + j + 2]):
                continue
            made = eagle3.project(
                head, params, target.embed, batch.tokens[:, 1 : i + 2], fused[:, : i + 1], jnp.arange(i + 1)[None]
            )
            keys, values, queries, residual = made.key, made.value, made.query, made.residual
            for k in range(j + 1):
                seen = jnp.ones((1, 1, keys.shape[1]), bool)
                none = jnp.zeros((1, head.num_kv_heads, head.head_dim, 1))
                attended = attend(
                    queries[:, -1:], none, none.transpose(0, 1, 3, 2), jnp.zeros(1, jnp.int32), keys, values, seen
                )
                out = eagle3.finish(head, params, residual[:, -1:], attended)
                if k < j:
                    made = eagle3.project(
                        head, params, target.embed, batch.tokens[:, i + k + 2][:, None], out, jnp.array([[i + k + 1]])
                    )
                    keys = jnp.concatenate([keys, made.key], axis=1)
                    values = jnp.concatenate([values, made.value], axis=1)
                    queries, residual = made.query, made.residual
            rows = teacher[i + j + 1]
            if int(rows.argmax()) not in params.draft_to_target.tolist():
                continue
            p = jax.nn.softmax(rows[params.draft_to_target])
            q = jax.nn.log_softmax(eagle3.logits(head, params, out)[0, 0])
            terms.append(-(p * q).sum())
        counts.append(len(terms))
        total += losses.DECAY**j * (sum(terms) / len(terms) if terms else 0.0)
    return total, counts


def test_loss_and_gradient_equal_the_loop():
    mask = [False] * 4 + [True] * 4 + [False] * 2  # tokens 4 to 7 are the answer
    config, target, head, params, batch = setup(mask)
    (fast, metrics), gradient = jax.value_and_grad(
        lambda q: losses.eagle3_loss(head, params.replace(q=q), target, batch, steps=3), has_aux=True
    )(params.q)
    (slow, counts), expected = jax.value_and_grad(
        lambda q: slow_loss(config, target, head, params.replace(q=q), batch, 3), has_aux=True
    )(params.q)
    assert metrics.labels.tolist() == counts and counts[0] >= 2
    np.testing.assert_allclose(fast, slow, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_no_labels_is_no_loss():
    _, target, head, params, batch = setup([False] * 10)
    loss, metrics = losses.eagle3_loss(head, params, target, batch, steps=3)
    assert float(loss) == 0.0 and metrics.labels.tolist() == [0, 0, 0]


def test_a_step_learns_and_leaves_the_vocabulary_map():
    _, target, head, params, batch = setup([True] * 10)
    optimizer = step.make_optimizer(20, peak=3e-3)
    state = step.init(optimizer, params)
    advance = jax.jit(
        lambda state: step.train_step(
            lambda p, b, _: losses.eagle3_loss(head, p, target, b, steps=2), optimizer, state, batch
        )
    )
    seen = []
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        for _ in range(20):
            state, loss, norm, _ = advance(state)
            seen.append(float(loss))
            assert 0 < float(norm) < 1e3
    assert seen[-1] < 0.7 * seen[0] and int(state.step) == 20
    np.testing.assert_array_equal(state.params.draft_to_target, params.draft_to_target)
