"""The k best entries of each row, in plain JAX."""

import jax
import jax.numpy as jnp


def topk_rows(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Values, float32, and ids of the k largest entries: largest first, of equal ones the lowest id."""
    # The barrier keeps XLA:CPU from turning a top-k with several readers into a full sort, float32 from
    # the slow path of bfloat16.
    values, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits.astype(jnp.float32), k))
    return values, ids
