"""topm_score: reference against a loop, both kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import INTERPRETED, CheckedLoads, jitted

from pallas_kernels import topm_score
from pallas_kernels.topm_score.specs import SPECS, Spec

# Scores of float32 rows; those of bfloat16 rows round their inputs alike and differ by summation alone.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-3}


def _inputs(spec: Spec, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    B, W, R, M, _ = spec
    tokens = np.sort(rng.permutation(B * M * 3)[: B * M].reshape(B, M), axis=1)
    arrays = (
        rng.normal(size=(B, R)), rng.normal(size=(B, W, R)), rng.normal(size=(B, M, R)) / np.sqrt(R),
        3 * rng.normal(size=(B, M)),
    )  # fmt: skip
    hidden, state, rows, base = (jnp.asarray(x, jnp.float32) for x in arrays)
    return hidden, state, rows.astype(dtype), base, jnp.asarray(tokens, jnp.int32)


def _loop(hidden, state, rows, base, tokens, children, rest):
    """One score at a time, in float64."""
    hidden, state, rows, base, tokens = (np.asarray(x, np.float64) for x in (hidden, state, rows, base, tokens))
    found, scores = [], []
    for b, w in np.ndindex(state.shape[:2]):
        x = hidden[b] + state[b, w]
        x = x / (1 + np.exp(-x))
        corrected = [base[b, c] + float(x @ rows[b, c]) for c in range(rows.shape[1])]
        mass = sum(np.exp(score) for score in corrected) + np.exp(rest[b])
        line = sorted((-score, c) for c, score in enumerate(corrected))[:children]
        found.append([tokens[b, c] for _, c in line])
        scores.append([-score - np.log(mass) if np.isfinite(score) else -np.inf for score, _ in line])
    shape = (*state.shape[:2], children)
    return np.array(found, np.int32).reshape(shape), np.array(scores).reshape(shape)


ODD = {
    "one lane, one candidate": Spec(1, 1, 3, 1, 1),
    "odd sizes": Spec(2, 17, 37, 13, 5),
    "all candidates kept": Spec(1, 5, 16, 9, 9),
    "full frontier": Spec(1, 65, 32, 64, 8),
}


@pytest.mark.parametrize("rest", [-np.inf, 0.5])
@pytest.mark.parametrize("name", ODD)
def test_all_equal_a_loop(name, rest):
    spec = ODD[name]
    inputs, mass = _inputs(spec), np.full(spec.batch, rest, np.float32)
    wanted = _loop(*inputs, spec.children, mass)
    for implementation in ("xla", *INTERPRETED):
        tokens, scores = topm_score(*inputs, spec.children, rest=jnp.asarray(mass), implementation=implementation)
        np.testing.assert_array_equal(tokens, wanted[0], err_msg=implementation)
        np.testing.assert_allclose(scores, wanted[1], atol=TOLERANCE["float32"], err_msg=implementation)


@pytest.mark.parametrize("implementation", ["xla", *INTERPRETED])
def test_masked_candidates_empty_slots_and_poisoned_lanes(implementation):
    spec = Spec(3, 6, 8, 12, 4)
    hidden, state, rows, base, tokens = _inputs(spec)
    base = base.at[0, 2:].set(-jnp.inf)  # two candidates for four children
    base = base.at[1].set(-jnp.inf)  # none
    clean = topm_score(hidden, state, rows, base, tokens, 4, implementation="xla")
    state = state.at[:, 4:].set(jnp.nan)  # lanes that nothing filled
    found, scores = topm_score(hidden, state, rows, base, tokens, 4, implementation=implementation)
    np.testing.assert_array_equal(found[:, :4], clean[0][:, :4])
    np.testing.assert_allclose(scores[:, :4], clean[1][:, :4], atol=TOLERANCE["float32"])
    assert np.isneginf(scores[0, :4, 2:]).all() and np.isneginf(scores[1, :4]).all()
    assert np.isfinite(scores[0, :4, :2]).all() and np.isfinite(scores[2, :4]).all()


@pytest.mark.parametrize("implementation", ["xla", *INTERPRETED])
def test_of_equal_scores_the_first_candidate_wins_and_ids_may_repeat(implementation):
    hidden, state = jnp.zeros((1, 4)), jnp.zeros((1, 3, 4))
    rows, base = jnp.ones((1, 6, 4)), jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]])
    tokens = jnp.array([[3, 9, 9, 4, 7, -5]], jnp.int32)
    found, _ = topm_score(hidden, state, rows, base, tokens, 5, implementation=implementation)
    np.testing.assert_array_equal(found, np.broadcast_to([9, 9, 4, 3, -5], (1, 3, 5)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPECS)
def test_kernels_agree_with_the_reference_at_real_shapes(name, dtype):
    spec = SPECS[name]
    inputs = _inputs(spec, dtype)
    wanted, scores = jitted(topm_score, children=spec.children, implementation="xla")(*inputs)
    # Seeds at which no two of the first nine scores are closer than the sums' own error.
    wide = topm_score(*inputs, spec.children + 1, implementation="xla")[1]
    clear = np.diff(-np.asarray(wide), axis=2).min(axis=2) > 2 * TOLERANCE[dtype]
    assert clear.mean() > 0.75
    for implementation in INTERPRETED:
        tokens, found = jitted(topm_score, children=spec.children, implementation=implementation)(*inputs)
        np.testing.assert_array_equal(np.asarray(tokens)[clear], np.asarray(wanted)[clear], err_msg=implementation)
        np.testing.assert_allclose(found, scores, atol=TOLERANCE[dtype], err_msg=implementation)


def test_nothing_is_read_outside_the_arrays(monkeypatch):
    loads, spec = CheckedLoads(monkeypatch), ODD["odd sizes"]
    jax.block_until_ready(topm_score(*_inputs(spec), spec.children, implementation="pallas-triton-interpret"))
    loads.assert_all_inside()


def test_refusals():
    inputs = _inputs(Spec(1, 2, 4, 6, 1))
    with pytest.raises(ValueError, match=r"children=7 must be between 1 and the 6 candidates"):
        topm_score(*inputs, 7)
    with pytest.raises(ValueError, match=r"hidden has shape \(1, 3\).* need \(1, 4\)"):
        topm_score(inputs[0][:, :3], *inputs[1:], 2)
    bad = (*inputs[:2], inputs[2].astype(jnp.float8_e4m3fn), *inputs[3:])
    with pytest.raises(NotImplementedError, match="topm_score.*float16 rows, got float8_e4m3fn"):
        topm_score(*bad, 2, implementation="pallas-triton")
