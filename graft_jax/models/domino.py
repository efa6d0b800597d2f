"""Domino's head as pure functions: a GRU over the chosen tokens corrects the block's logits at low rank.

With z the backbone's output of a slot and s the state after the tokens before it:

    logits = base + W2 silu(W1 [z, s])

Symbols of the reference: W_ih `gru_input`, W_hh `gru_state`, W1 `hidden_down` and `state_down`, W2 `up`.
The GRU's input product is made of the rows of the embedding that are needed: a table of it for the whole
vocabulary would save a third of the head's work on few lanes and cost more memory than the drafter itself.
"""

import jax
import jax.numpy as jnp

from graft_jax.models.dflash import DominoParams
from graft_jax.models.layers import linear, matmul, take_rows
from graft_jax.types import Array, Float, Int


def advance(
    params: DominoParams, embed: Float[Array, "V M"], state: Float[Array, "B W G"], tokens: Int[Array, "B W"]
) -> Float[Array, "B W G"]:
    """The states after one more token each (`torch.nn.GRU` without biases, gates r, z, n)."""
    inputs = linear(take_rows(embed, tokens), params.gru_input)
    r_in, z_in, n_in = jnp.split(inputs, 3, axis=-1)
    r_state, z_state, n_state = jnp.split(linear(state, params.gru_state), 3, axis=-1)
    r, z = jax.nn.sigmoid(r_in + r_state), jax.nn.sigmoid(z_in + z_state)
    n = jnp.tanh(n_in + r * n_state)
    return (1.0 - z) * n + z * state


def compress(
    params: DominoParams, hidden_part: Float[Array, "B #W R"], state: Float[Array, "B W G"]
) -> Float[Array, "B W R"]:
    """silu(W1 [z, s]), given `linear(z, hidden_down)`, which all states of a slot share."""
    return jax.nn.silu(hidden_part + linear(state, params.state_down))


def correction(params: DominoParams, compressed: Float[Array, "B W R"]) -> Float[Array, "B W V"]:
    """What is added to the base logits, float32; `pallas_kernels.topm_score` adds it to candidates alone."""
    return matmul(compressed, params.up, 1)
