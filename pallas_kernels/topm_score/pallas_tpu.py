"""Corrected scores and their best candidates on a TPU: the GPU's body with a batch row's frontier in one program."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.topm_score import body

LANES = 128  # of a vector register


def unsupported(state, rows, base, children: int) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16 rows, got {rows.dtype}"
    if state.dtype != jnp.float32 or base.dtype != jnp.float32:
        return f"takes float32 projections and logits, got {state.dtype} and {base.dtype}"
    if children > LANES or rows.shape[1] > 512:
        return f"takes up to 512 candidates and {LANES} children, got {rows.shape[1]} and {children}"
    if state.shape[1] > 256 or state.shape[2] > 1024:
        return f"takes up to 256 lanes of rank 1024, got {state.shape[1:]}"
    return None


def topm_score(hidden, state, rows, base, tokens, rest, *, children: int, interpret: bool):
    """See `api.topm_score`."""
    (B, W, R), C = state.shape, rows.shape[1]

    def block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b: (b, 0, 0))

    found, log_probs = pl.pallas_call(
        functools.partial(_kernel, children=children),
        out_shape=(
            jax.ShapeDtypeStruct((B, W, LANES), jnp.int32), jax.ShapeDtypeStruct((B, W, LANES), jnp.float32)
        ),
        grid=(B,),
        in_specs=[block(1, R), block(W, R), block(C, R), block(1, C), block(1, C), block(1, 1)],
        out_specs=[block(W, LANES)] * 2,
        interpret=interpret,
        name="topm_score",
    )(hidden[:, None], state, rows, base[:, None], tokens[:, None], rest[:, None, None])  # fmt: skip
    return found[:, :, :children], log_probs[:, :, :children]


def _kernel(
    hidden_ref, state_ref, rows_ref, base_ref, tokens_ref, rest_ref, found_ref, log_probs_ref, *, children: int
):
    # hidden [1, R]; state [W, R]; rows [C, R]; base, tokens [1, C]; rest [1, 1]; found, log_probs [W, 128]
    correction = body.product(body.silu(hidden_ref[...] + state_ref[...]), rows_ref[...])
    found_ref[...], log_probs_ref[...] = body.best(
        correction, base_ref[...], tokens_ref[...], rest_ref[...], rows_ref.shape[0], children, LANES
    )
