"""The k best entries of each row over a large vocabulary, without a full sort."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.topk_rows import pallas_tpu, pallas_triton, reference


def topk_rows(logits: jax.Array, k: int, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of every row: largest first, of equal ones the lowest id.

    NaN ranks above infinity and -0.0 below 0.0, as in `jax.lax.top_k`.

    Args:
        logits: float [..., V].
        k: at most V.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None takes the platform's own.

    Returns:
        Values, float32 [..., k], and ids, int32 [..., k].

    Raises:
        ValueError: k is not between 1 and V, or the name is unknown.
        NotImplementedError: the named implementation does not take these logits.
    """
    V = logits.shape[-1]
    if not 1 <= k <= V:
        raise ValueError(f"{k=} must be between 1 and the {V} entries of a row")
    rows = jax.ShapeDtypeStruct((logits.size // V, V), logits.dtype)

    def flat(run):
        def on_rows(x, **options):
            values, ids = run(x.reshape(rows.shape), k=k, **options)
            return values.reshape(*x.shape[:-1], k), ids.reshape(*x.shape[:-1], k).astype(jnp.int32)

        return on_rows

    return dispatch.call(
        "topk_rows", implementation, functools.partial(reference.topk_rows, k=k),
        {
            dispatch.TRITON: dispatch.Version(flat(pallas_triton.topk_rows), pallas_triton.unsupported(rows, k)),
            dispatch.TPU: dispatch.Version(flat(pallas_tpu.topk_rows), pallas_tpu.unsupported(rows, k)),
        },
        logits,
    )  # fmt: skip
