"""topk_rows: reference against a loop, both kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import INTERPRETED, jitted

from pallas_kernels import topk_rows
from pallas_kernels.topk_rows.specs import SPECS


def _loop(row: np.ndarray, k: int) -> list[int]:
    """NaN first, then the largest; -0.0 is below 0.0; of equal ones the lowest id."""

    def rank(i: int):
        return (not np.isnan(row[i]), -row[i] if not np.isnan(row[i]) else 0.0, np.signbit(row[i]) == (row[i] == 0), i)

    return sorted(range(len(row)), key=rank)[:k]


def _odd_rows(V: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(11, V)).astype(np.float32)
    rows[1] = np.nan  # a row that nothing wrote
    rows[2] = -np.inf  # nothing known
    rows[3] = np.round(rows[3])  # ties
    rows[4] = np.where(np.arange(V) % 2 == 0, 0.0, -0.0)
    rows[5, V // 2] = np.nan
    rows[6, : V - 1] = -np.inf  # one entry
    rows[7, [0, V - 1]] = np.inf
    rows[8] = 1.0
    rows[9, :-8] = -np.inf  # the last eight, at the edge of the last tile
    rows[10, ::2] = -1e38
    return rows


@pytest.mark.parametrize("V, k", [(1, 1), (5, 5), (127, 8), (129, 3), (4097, 8), (9000, 60)])
def test_all_equal_a_loop_on_odd_rows(V, k):
    rows = _odd_rows(max(V, 9))[:, :V]
    wanted = np.array([_loop(row, k) for row in rows])
    for implementation in ("xla", *INTERPRETED):
        values, ids = jitted(topk_rows, k=k, implementation=implementation)(jnp.asarray(rows))
        assert ids.dtype == jnp.int32 and values.dtype == jnp.float32
        np.testing.assert_array_equal(ids, wanted, err_msg=implementation)
        np.testing.assert_array_equal(values, np.take_along_axis(rows, wanted, axis=1), err_msg=implementation)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_equal_the_reference_at_real_shapes(name, implementation, key):
    spec = SPECS[name]
    logits = jax.random.normal(key, (1, spec.rows, spec.vocabulary))
    # Rows of a tree that nothing verified hold anything, and do not reach into others.
    logits = logits.at[0, -1].set(jnp.nan)
    wanted = topk_rows(logits, spec.k, implementation="xla")
    found = jitted(topk_rows, k=spec.k, implementation=implementation)(logits)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_bfloat16_ranks_like_its_float32_values(implementation, key):
    logits = jax.random.normal(key, (3, 700)).astype(jnp.bfloat16)  # many ties
    wanted = topk_rows(logits.astype(jnp.float32), 8, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, topk_rows(logits, 8, implementation=implementation), wanted)


def test_refusals():
    logits = jnp.zeros((2, 700))
    with pytest.raises(ValueError, match=r"k=701 must be between 1 and the 700"):
        topk_rows(logits, 701)
    with pytest.raises(NotImplementedError, match="topk_rows.*float32 and bfloat16 logits, got int32"):
        topk_rows(jnp.zeros((2, 700), jnp.int32), 8, implementation="pallas-tpu")
    with pytest.raises(NotImplementedError, match="k from 1 to 512, got 600"):
        topk_rows(logits, 600, implementation="pallas-triton")
    with pytest.raises(ValueError, match="implementation='cuda' must be one of"):
        topk_rows(logits, 8, implementation="cuda")
