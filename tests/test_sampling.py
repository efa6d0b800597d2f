"""The sampler against sorting in NumPy, and its distribution by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import process_one

from graft_jax import sampling, verify
from graft_jax.tree.structure import DRAFTED, ROOT, DraftTree

DRAWS = 200_000
_processed = jax.jit(lambda logits, config: jax.nn.softmax(sampling.process(logits, config)))


@example([0.0] * 23 + [-0.0], 1.0, 0, 0.1, 0.0)
@given(
    logits=st.lists(st.floats(-8, 8, width=16).map(float), min_size=24, max_size=24),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_process_equals_sorting(logits, temperature, top_k, top_p, min_p):
    config = sampling.make([0], temperature, top_k, top_p, min_p)
    x = np.array(logits, np.float32)
    mine = np.asarray(_processed(jnp.asarray(x)[None], config))[0]
    expected = process_one(x, temperature, top_k, top_p, min_p)
    if ((mine > 0) != (expected > 0)).any():
        # Only a cumulative mass within rounding of top_p may fall on the other side.
        sums = np.cumsum(np.sort(process_one(x, temperature, top_k))[::-1])
        assert np.abs(sums - top_p).min() < 1e-6
    else:
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def _count(tree_tokens, logits, **settings):
    """Shares of the first emitted token over many keys, for a root with the given children."""
    V, n = len(logits), len(tree_tokens)
    N = n + 1

    def one(seed):
        tree = DraftTree(
            tokens=jnp.array([[0, *tree_tokens]]),
            parents=jnp.array([[-1] + [0] * n]),
            depth=jnp.array([[0] + [1] * n]),
            score=jnp.zeros((1, N)),
            source=jnp.array([[ROOT] + [DRAFTED] * n]),
            valid=jnp.ones((1, N), bool),
        )
        rows = jnp.broadcast_to(jnp.array(logits, jnp.float32), (1, N, V))
        config = sampling.make([0], **settings).replace(key=jax.random.key(seed)[None])
        verdict = verify.accept(tree, rows, config, jnp.array([5]), jnp.array([True]), 1)
        return verdict.tokens[0, 0], verdict.num_accepted[0]

    seeds = jnp.arange(DRAWS, dtype=jnp.uint32)
    tokens, accepted = jax.jit(lambda seeds: jax.lax.map(one, seeds, batch_size=20_000))(seeds)
    return np.bincount(np.asarray(tokens), minlength=V) / DRAWS, float(accepted.mean())


@pytest.mark.parametrize(
    ("drafted", "p", "settings", "expected"),
    [
        ([0], [0.6, 0.4], {}, [0.6, 0.4]),
        ([0, 1], [0.5, 0.3, 0.15, 0.05], {"top_k": 2}, [0.625, 0.375, 0, 0]),
        ([0, 0], [0.5, 0.5], {}, [0.5, 0.5]),
        ([2], [0.7, 0.3, 0.0], {}, [0.7, 0.3, 0.0]),
    ],
)
def test_emitted_distribution_is_the_targets(drafted, p, settings, expected):
    with np.errstate(divide="ignore"):
        shares, accepted = _count(drafted, np.log(p), temperature=1.0, **settings)
    np.testing.assert_allclose(shares, expected, atol=0.005)
    assert abs(accepted - sum(expected[t] for t in set(drafted))) < 0.005
    assert shares[np.array(expected) == 0].sum() == 0


def test_greedy_ties_take_the_lowest_id():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0]])
    assert sampling.choose(logits, sampling.make([3]), jnp.array([0])).tolist() == [1]


def test_noise_depends_on_key_and_position_only():
    logits = jax.random.normal(jax.random.key(1), (1, 50))
    config = sampling.make([7], temperature=1.0)
    choose = jax.jit(sampling.choose)
    alone = [int(choose(logits, config, jnp.array([i]))[0]) for i in range(20)]
    both = sampling.make([1, 7], temperature=1.0)
    rows = jnp.concatenate([logits * 0, logits])
    paired = [int(choose(rows, both, jnp.array([99, i]))[1]) for i in range(20)]
    assert alone == paired and len(set(alone)) > 5


def test_rows_may_mix_greedy_and_sampled():
    logits = jax.random.normal(jax.random.key(1), (2, 50))
    mixed = sampling.make([0, 0], temperature=1.0).replace(temperature=jnp.array([0.0, 1.0]))
    assert int(sampling.choose(logits, mixed, jnp.array([4, 4]))[0]) == int(logits[0].argmax())


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}]
)
def test_bad_settings_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        sampling.make([0], **bad)
