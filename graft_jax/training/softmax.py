"""Softmax of large rows in parts that are made once each."""

import jax
import jax.numpy as jnp

from graft_jax.types import Array, Float


def parts(logits: Float[Array, "*N V"]) -> tuple[Float[Array, "*N V"], Float[Array, "*N 1"], Float[Array, "*N 1"]]:
    """Exponentials of the logits less the row's largest, their sum, and the largest."""
    top = logits.max(axis=-1, keepdims=True)
    # XLA:CPU computes exponentials again for every use, and slowly within a reduction: kept, and summed as a product
    # with ones, they cost half.
    weights = jax.lax.optimization_barrier(jnp.exp(logits - top))
    total = jnp.einsum("...v,v->...", weights, jnp.ones(weights.shape[-1]), precision=jax.lax.Precision.HIGHEST)
    return weights, total[..., None], top
