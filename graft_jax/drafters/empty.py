"""The drafter that proposes nothing: plain decoding."""

import dataclasses

import jax.numpy as jnp

from graft_jax.drafters.base import Draft
from graft_jax.tree import structure


@dataclasses.dataclass(frozen=True)
class Empty:
    """Its tree is only the root. Alone it is `ar`; under `Graft` it is Token Recycling."""

    taps: tuple[int, ...] = ()
    wants_logits: bool = False
    capacity: int = 0
    max_depth: int = 0

    def init(self, params, batch, cache_size, memory):
        return None

    def memory(self, state):
        return None

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        return state

    def draft(self, params, state, root, length, active):
        zero = jnp.zeros(root.shape, jnp.int32)
        return Draft(structure.root_only(root), zero, jnp.zeros((*root.shape, 0)), zero), state

    def observe(self, params, state, tree, verdict, taps, logits):
        return state
