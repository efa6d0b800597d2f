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
from pallas_kernels import dispatch, topk_rows, topm_score
from pallas_kernels.topk_rows import reference


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
        kernels: implementation of the kernels, as in `SuccessorTable`.
        normaliser: what probabilities of corrected slots sum over: the candidates ("slice", the papers') or the
            whole vocabulary ("full"; what is no candidate counts with its uncorrected logit).
    """

    budget: int
    tree: Literal["chain", "greedy-path", "path"] = "path"
    candidates: int = 64
    children: int = 8
    normaliser: Literal["slice", "full"] = "slice"
    kernels: str | None = None

    def __post_init__(self):
        if self.tree not in ("chain", "greedy-path", "path"):
            raise ValueError(f"scoring={self.tree!r} must be 'chain', 'greedy-path' or 'path'")
        if self.normaliser not in ("slice", "full"):
            raise ValueError(f"normaliser={self.normaliser!r} must be 'slice' or 'full'")
        if self.budget < 1 or self.candidates < 0 or self.children < 1:
            raise ValueError(f"{self} needs budget and children of at least 1 and candidates of at least 0")
        dispatch.check(self.kernels)

    def __call__(self, config, params, slots, root, active):
        head, embed = params.drafter.domino, params.target.embed
        slate = self._slate(head, slots)
        B, D, C = slate.base.shape
        children = 1 if self.tree == "chain" else min(self.children, self.budget, C)
        zero = jnp.zeros((B, 1, config.domino.gru_size), jnp.float32)
        start = domino.advance(head, embed, zero, root[:, None])

        def successors(slot, states) -> tuple[Int[Array, "B W C"], Float[Array, "B W C"]]:
            return self._best(config.domino.prefix, head, slate, slot, states, children)

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
        _, tokens = topk_rows(logits, self.candidates, implementation=self.kernels)
        tokens = jnp.sort(tokens, axis=-1)  # so that of equal scores the lowest id stands first
        base = jnp.take_along_axis(logits, tokens, axis=-1)
        # Where next to nothing is left the difference is rough, and does not matter.
        share = jnp.exp(base - total[:, :, None]).sum(axis=-1)
        rest = total + jnp.log(jnp.maximum(1.0 - share, 0.0))
        rows = take_rows(head.up, tokens)
        return Slate(tokens, base, rows, hidden_part, total, rest)

    def _best(
        self, prefix: int, head: DominoParams, slate: Slate, slot: Int[Array, ""], states: Float[Array, "B W G"],
        children: int,
    ) -> tuple[Int[Array, "B W C"], Float[Array, "B W C"]]:  # fmt: skip
        """A slot's best successors after each of W paths, and log-probabilities; `prefix` slots stay uncorrected."""

        def here(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, slot, axis=1)

        full = self.normaliser == "full"
        plain = here(slate.base) - here(slate.total)[:, :, None]
        if slate.tokens is None or slate.rows is None:
            corrected = here(slate.base) + domino.correction(
                head, domino.compress(head, here(slate.hidden_part), states)
            )
            log_probs = corrected - jax.nn.logsumexp(corrected, axis=-1)[:, :, None]
            values, tokens = topk_rows(
                jnp.where(slot < prefix, plain, log_probs), children, implementation=self.kernels
            )  # fmt: skip
            return tokens, values
        tokens = here(slate.tokens)[:, 0]
        found, values = topm_score(
            here(slate.hidden_part)[:, 0], linear(states, head.state_down), here(slate.rows)[:, 0],
            here(slate.base)[:, 0], tokens, children, rest=here(slate.rest)[:, 0] if full else None,
            implementation=self.kernels,
        )  # fmt: skip
        if not prefix:
            return found, values
        plain_values, index = reference.topk_rows(plain, children)
        plain_tokens = jnp.take_along_axis(tokens[:, None], index, axis=2)
        return jnp.where(slot < prefix, plain_tokens, found), jnp.where(slot < prefix, plain_values, values)
