"""Prompt lookup decoding: what followed the last time these words stood here."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from graft_jax.drafters.base import Draft
from graft_jax.tree import structure
from graft_jax.types import Array, Int


class LookupState(flax.struct.PyTreeNode):
    """All tokens before the root, and how many there are."""

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Proposes the continuation of an earlier occurrence of the last tokens, as a chain.

    The longest n-gram that ends the text and stood before wins; among its occurrences the first, as in
    transformers' `prompt_lookup_num_tokens` and vLLM's n-gram proposer.

    Attributes:
        capacity: K, tokens to propose.
        prompt_lookup_max, prompt_lookup_min: lengths of n-grams tried, longest first.
    """

    capacity: int = 7
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    taps: tuple[int, ...] = ()
    wants_logits: bool = False

    def __post_init__(self):
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be between 1 and {self.prompt_lookup_max=}"
            )
        if self.capacity < 1:
            raise ValueError(f"capacity={self.capacity} must be at least 1 token")

    @property
    def max_depth(self) -> int:
        return self.capacity

    def init(self, params, batch, cache_size, memory):
        tokens = jnp.zeros((batch, cache_size), jnp.int32)
        return LookupState(tokens, jnp.zeros(batch, jnp.int32))

    def memory(self, state):
        return None

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        return _put(state, tokens, valid.sum(axis=1, dtype=jnp.int32))

    def draft(self, params, state, root, length, active):
        B, S = state.tokens.shape
        index = jnp.arange(S)[None, :]
        line = jnp.where(index == length[:, None], root[:, None], state.tokens)
        # same[i]: the n tokens that end at i equal the n that end at the root.
        same = index < length[:, None]
        at = jnp.zeros(B, jnp.int32)
        found = jnp.zeros(B, bool)
        for n in range(self.prompt_lookup_max):
            wanted = jnp.take_along_axis(line, jnp.maximum(length - n, 0)[:, None], axis=1)
            shifted = jnp.pad(line, ((0, 0), (n, 0)), constant_values=-1)[:, :S]
            same &= (shifted == wanted) & (length >= n)[:, None]
            if n + 1 >= self.prompt_lookup_min:
                better = same.any(axis=1)
                at = jnp.where(better, jnp.argmax(same, axis=1), at)
                found |= better
        proposed = at[:, None] + 1 + jnp.arange(self.capacity)[None, :]
        count = jnp.where(found, jnp.minimum(length - at, self.capacity), 0)
        tokens = jnp.take_along_axis(line, proposed, axis=1, mode="clip")
        zero = jnp.zeros(B, jnp.int32)
        confidence = jnp.full((B, self.capacity), jnp.nan)
        return Draft(structure.chain(root, tokens, count), zero, confidence, zero), state

    def observe(self, params, state, tree, verdict, taps, logits):
        line = jnp.concatenate([tree.tokens[:, :1], verdict.tokens], axis=1)
        return _put(state, line, jnp.where(verdict.active, verdict.count, 0))


def _put(state: LookupState, tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> LookupState:
    """Appends the first `count` of `tokens` to each row."""
    offset = jnp.arange(state.tokens.shape[1])[None, :] - state.length[:, None]
    new = jnp.take_along_axis(tokens, jnp.clip(offset, 0, tokens.shape[1] - 1), axis=1)
    here = (offset >= 0) & (offset < count[:, None])
    return LookupState(jnp.where(here, new, state.tokens), state.length + count)
