"""Corrected scores and their best candidates on a GPU, through Triton: one launch a depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.topm_score import body


@dataclasses.dataclass(frozen=True)
class Config:
    """Frontier lanes a program and ranks a step of the product, powers of two of at least 16; warps a program."""

    lanes: int = 16
    ranks: int = 64
    num_warps: int = 4


def unsupported(state, rows, base, children: int) -> str | None:
    """Why the kernel does not take this call, if it does not."""
    if rows.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"takes float32, bfloat16 and float16 rows, got {rows.dtype}"
    if state.dtype != jnp.float32 or base.dtype != jnp.float32:
        return f"takes float32 projections and logits, got {state.dtype} and {base.dtype}"
    if rows.shape[1] > 512:
        return f"takes up to 512 candidates, got {rows.shape[1]}"
    return None


def topm_score(hidden, state, rows, base, tokens, rest, *, children: int, interpret: bool, config: Config = Config()):
    """See `api.topm_score`."""
    B, W, _ = state.shape
    width, lanes = pl.next_power_of_2(children), config.lanes
    tiles = pl.cdiv(W, lanes)
    shape = (B, tiles * lanes, width)
    found, log_probs = pl.pallas_call(
        functools.partial(_kernel, children=children, config=config),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(B, tiles),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 6,
        out_specs=[pl.BlockSpec((None, lanes, width), lambda b, t: (b, t, 0))] * 2,
        compiler_params=triton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="topm_score",
    )(hidden, state, rows, base, tokens, rest)
    return found[:, :W, :children], log_probs[:, :W, :children]


def _kernel(
    hidden_ref, state_ref, rows_ref, base_ref, tokens_ref, rest_ref, found_ref, log_probs_ref,
    *, children: int, config: Config,
):  # fmt: skip
    # hidden [B, R]; state [B, W, R]; rows [B, C, R]; base, tokens [B, C]; rest [B]; found, log_probs [lanes, width]
    (_, W, R), C = state_ref.shape, rows_ref.shape[1]
    padded = max(pl.next_power_of_2(C), 16)
    b = pl.program_id(0)
    lane = pl.program_id(1) * config.lanes + jax.lax.broadcasted_iota(jnp.int32, (config.lanes, config.ranks), 0)
    candidate = jax.lax.broadcasted_iota(jnp.int32, (padded, config.ranks), 0)

    def add(i, total):
        def load(ref, row, rows: int, of: int):
            rank = i * config.ranks + jax.lax.broadcasted_iota(jnp.int32, (rows, config.ranks), 1)
            return triton.load(ref.at[b, row, rank], mask=(row < of) & (rank < R), other=0.0)

        rank = i * config.ranks + jax.lax.broadcasted_iota(jnp.int32, (1, config.ranks), 1)
        shared = triton.load(hidden_ref.at[b, rank], mask=rank < R, other=0.0)
        compressed = body.silu(shared + load(state_ref, lane, config.lanes, W))
        return total + body.product(compressed, load(rows_ref, candidate, padded, C))

    zero = jnp.zeros((config.lanes, padded), jnp.float32)
    correction = jax.lax.fori_loop(0, pl.cdiv(R, config.ranks), add, zero)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, padded), 1)
    base = triton.load(base_ref.at[b, column], mask=column < C, other=0.0)
    tokens = triton.load(tokens_ref.at[b, column], mask=column < C, other=0)
    width = found_ref.shape[1]
    found_ref[...], log_probs_ref[...] = body.best(correction, base, tokens, rest_ref[b], C, children, width)
