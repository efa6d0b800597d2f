"""Layers whose cost is part of what they promise."""

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.models.layers import take_rows


def test_rows_of_a_table_cost_no_copy_of_it_in_a_loop():
    """A bfloat16 table stays as it is while a loop takes rows of it."""
    table = jax.random.normal(jax.random.key(0), (4096, 64), jnp.bfloat16)
    index = jnp.array([[5, 4000, 5]])

    @jax.jit
    def walk(table, index):
        def step(i, carry):
            at, total = carry
            return (at + 1) % 4096, total + take_rows(table, at).astype(jnp.float32)

        return jax.lax.fori_loop(0, 7, step, (index, jnp.zeros((1, 3, 64))))[1]

    expected = sum(np.asarray(table, np.float32)[(np.asarray(index) + i) % 4096] for i in range(7))
    np.testing.assert_allclose(walk(table, index), expected, rtol=1e-6)
    compiled = walk.lower(table, index).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes / 4


def test_rows_of_a_table_have_gradients():
    table = jnp.arange(12.0).reshape(4, 3)
    grad = jax.grad(lambda table: (take_rows(table, jnp.array([1, 1, 3])) * jnp.array([[1.0], [2.0], [4.0]])).sum())
    np.testing.assert_array_equal(grad(table), jnp.repeat(jnp.array([[0.0], [3.0], [0.0], [4.0]]), 3, axis=1))
