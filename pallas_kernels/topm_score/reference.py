"""Low-rank corrected scores of a slot's candidates after each path, and the best of them, in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.topk_rows.reference import topk_rows


def topm_score(
    hidden: jax.Array,
    state: jax.Array,
    rows: jax.Array,
    base: jax.Array,
    tokens: jax.Array,
    rest: jax.Array,
    *,
    children: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.topm_score`."""
    compressed = jax.nn.silu(hidden[:, None, :] + state)
    correction = jnp.einsum(
        "bwr,bcr->bwc", compressed.astype(rows.dtype), rows,
        precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
    )  # fmt: skip
    corrected = base[:, None, :] + correction
    mass = jnp.logaddexp(jax.nn.logsumexp(corrected, axis=-1), rest[:, None])
    log_probs = jnp.where(jnp.isneginf(corrected), -jnp.inf, corrected - mass[:, :, None])
    values, index = topk_rows(log_probs, children)
    here = jnp.broadcast_to(tokens[:, None, :], (*index.shape[:2], tokens.shape[1]))
    return jnp.take_along_axis(here, index, axis=2), values
