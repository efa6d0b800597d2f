"""DominoTree's conditional top-M scoring: correct a slot's candidates by each path at low rank, keep the best."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.topm_score import pallas_tpu, pallas_triton, reference


def topm_score(
    hidden: jax.Array,
    state: jax.Array,
    rows: jax.Array,
    base: jax.Array,
    tokens: jax.Array,
    children: int,
    *,
    rest: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The best candidates of every frontier lane and their log-probabilities.

        corrected[w, c] = base[c] + silu(hidden + state[w]) . rows[c]
        log_probs[w, c] = corrected[w, c] - log(sum over c of exp(corrected[w, c]) + exp(rest))

    Symbols of the paper: hidden is Wz z, state Ws s, rows are those of W2. The product runs in the dtype of `rows` with
    float32 accumulation, all else in float32.

    Args:
        hidden: float32 [B, R], what all lanes of the slot share.
        state: float32 [B, W, R].
        rows: [B, C, R], gathered once a round.
        base: float32 [B, C], the uncorrected logits; -inf is no candidate.
        tokens: int32 [B, C]. Of equal scores the one that stands first here comes first.
        children: how many to keep, at most C.
        rest: float32 [B], log of the mass of what is no candidate; None is none.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None takes the platform's own.

    Returns:
        Tokens, int32 [B, W, children], and log-probabilities, float32, best first; -inf where candidates run out.

    Raises:
        ValueError: shapes do not fit, or the name is unknown.
        NotImplementedError: the named implementation does not take these arrays.
    """
    (B, _, R), C = state.shape, rows.shape[1]
    wanted = {"hidden": (B, R), "rows": (B, C, R), "base": (B, C), "tokens": (B, C)}
    for name, array in (("hidden", hidden), ("rows", rows), ("base", base), ("tokens", tokens)):
        if array.shape != wanted[name]:
            raise ValueError(f"{name} has shape {array.shape}; {state.shape=} and {rows.shape=} need {wanted[name]}")
    if not 1 <= children <= C:
        raise ValueError(f"{children=} must be between 1 and the {C} candidates")
    rest = jnp.full((B,), -jnp.inf, jnp.float32) if rest is None else rest
    return dispatch.call(
        "topm_score", implementation, functools.partial(reference.topm_score, children=children),
        {
            name: dispatch.Version(
                functools.partial(module.topm_score, children=children),
                module.unsupported(state, rows, base, children),
            )
            for name, module in ((dispatch.TRITON, pallas_triton), (dispatch.TPU, pallas_tpu))
        },
        hidden, state, rows, base, tokens, rest,
    )  # fmt: skip
