"""Domino's policies for `drafters.dflash.DFlash`: chains and trees of corrected logits (DominoTree).

A slot's logits are corrected by the tokens before it. `Corrected(tree="chain")` does so along the greedy path
and keeps that path. "greedy-path" makes a best-first tree of the very same distributions, which all nodes of
one depth share. "path" (DominoTree) corrects every node by its own path, with a GRU state a lane. Domino's
uncorrected logits under `drafters.dflash.Marginal` complete the ladder.
"""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.drafters.dflash import Slots, scored_chain, shared_tree
from graft_jax.models import domino
from graft_jax.models.dflash import DominoParams
from graft_jax.models.layers import linear, take_rows
from graft_jax.tree.best_first import BestFirst, grow
from graft_jax.types import Array, Float, Int


class Slate(flax.struct.PyTreeNode):
    """A block's candidates and all that their correction needs, gathered once.

    Attributes:
        tokens: candidates of each slot, ids rising; None where all of the vocabulary are (C = V).
        base: their logits.
        rows: their rows of the correction's matrix; None with `tokens`.
        hidden_part: what each slot adds to all its corrections.
        total: log of the mass of the whole vocabulary, uncorrected.
        rest: log of the mass of what is no candidate.
    """

    tokens: Int[Array, "B D C"] | None
    base: Float[Array, "B D C"]
    rows: Float[Array, "B D C R"] | None
    hidden_part: Float[Array, "B D R"]
    total: Float[Array, "B D"]
    rest: Float[Array, "B D"]


@dataclasses.dataclass(frozen=True)
class Corrected:
    """Trees of corrected logits.

    Attributes:
        budget: nodes beside the root.
        tree: "chain", "greedy-path" or "path" (see the module).
        candidates: M, tokens a slot whose logits are corrected, the best uncorrected ones; 0 corrects all.
        children: successors of a node.
        normaliser: what probabilities of corrected slots sum over: the candidates ("slice", the papers') or the
            whole vocabulary ("full"; what is no candidate counts with its uncorrected logit).
    """

    budget: int
    tree: Literal["chain", "greedy-path", "path"] = "path"
    candidates: int = 64
    children: int = 8
    normaliser: Literal["slice", "full"] = "slice"

    def __post_init__(self):
        if self.tree not in ("chain", "greedy-path", "path"):
            raise ValueError(f"scoring={self.tree!r} must be 'chain', 'greedy-path' or 'path'")
        if self.normaliser not in ("slice", "full"):
            raise ValueError(f"normaliser={self.normaliser!r} must be 'slice' or 'full'")
        if self.budget < 1 or self.candidates < 0 or self.children < 1:
            raise ValueError(f"{self} needs budget and children of at least 1 and candidates of at least 0")

    def __call__(self, config, params, slots, root, active):
        head, embed = params.drafter.domino, params.target.embed
        slate = self._slate(head, slots)
        B, D, C = slate.base.shape
        children = 1 if self.tree == "chain" else min(self.children, self.budget, C)
        zero = jnp.zeros((B, 1, config.domino.gru_size), jnp.float32)
        start = domino.advance(head, embed, zero, root[:, None])

        def successors(slot, states) -> tuple[Int[Array, "B W C"], Float[Array, "B W C"]]:
            log_probs = self._score(config.domino.prefix, head, slate, slot, states)
            values, index = jax.lax.optimization_barrier(jax.lax.top_k(log_probs, children))
            if slate.tokens is None:
                return index, values
            here = jax.lax.dynamic_index_in_dim(slate.tokens, slot, axis=1)
            here = jnp.broadcast_to(here, (*index.shape[:2], C))
            return jnp.take_along_axis(here, index, axis=2), values

        if self.tree == "path":

            def expand(states, depth, lanes):
                states = jnp.take_along_axis(states, lanes.came_from[:, :, None], axis=1)
                states = domino.advance(head, embed, states, lanes.tokens)
                return *successors(depth, states), states

            tokens, log_probs = successors(jnp.int32(0), start)
            states = jnp.broadcast_to(start, (B, self.budget, start.shape[2]))
            sizes = BestFirst(D, self.budget, children)
            return grow(sizes, root, tokens[:, 0], log_probs[:, 0], expand, states, active)

        def step(state, slot):
            tokens, log_probs = successors(slot, state)
            return domino.advance(head, embed, state, tokens[:, :, 0]), (tokens[:, 0], log_probs[:, 0])

        _, (tokens, log_probs) = jax.lax.scan(step, start, jnp.arange(D))
        tokens, log_probs = tokens.transpose(1, 0, 2), log_probs.transpose(1, 0, 2)
        if self.tree == "chain":
            return scored_chain(root, tokens[:, :, 0], log_probs[:, :, 0], self.budget, active)
        return shared_tree(self.budget, root, tokens, log_probs, active)

    def _slate(self, head: DominoParams, slots: Slots) -> Slate:
        logits = slots.logits
        total = jax.nn.logsumexp(logits, axis=-1)
        hidden_part = linear(slots.hidden, head.hidden_down)
        if self.candidates == 0 or self.candidates >= logits.shape[-1]:
            return Slate(None, logits, None, hidden_part, total, jnp.full_like(total, -jnp.inf))
        _, tokens = jax.lax.optimization_barrier(jax.lax.top_k(logits, self.candidates))
        tokens = jnp.sort(tokens, axis=-1)  # so that of equal scores the lowest id stands first
        base = jnp.take_along_axis(logits, tokens, axis=-1)
        # Where next to nothing is left the difference is rough, and does not matter.
        share = jnp.exp(base - total[:, :, None]).sum(axis=-1)
        rest = total + jnp.log(jnp.maximum(1.0 - share, 0.0))
        rows = take_rows(head.up, tokens)
        return Slate(tokens, base, rows, hidden_part, total, rest)

    def _score(
        self, prefix: int, head: DominoParams, slate: Slate, slot: Int[Array, ""], states: Float[Array, "B W G"]
    ) -> Float[Array, "B W C"]:
        """Log-probabilities of a slot's candidates after each of W paths."""

        def here(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, slot, axis=1)

        rows = None if slate.rows is None else here(slate.rows)[:, 0]
        compressed = domino.compress(head, here(slate.hidden_part), states)
        corrected = here(slate.base) + domino.correction(head, compressed, rows)
        mass = jax.nn.logsumexp(corrected, axis=-1)
        if self.normaliser == "full":
            mass = jnp.logaddexp(mass, here(slate.rest))
        plain = here(slate.base) - here(slate.total)[:, :, None]
        return jnp.where(slot < prefix, plain, corrected - mass[:, :, None])
