"""Block drafters: DFlash's backbone says a whole block in one pass, and a policy makes a tree of it.

DFlash alone is `DFlash(policy=Chain(...))`; DDTree (arXiv 2604.12989) is `DFlash(policy=Marginal(...))`. With
the policies of `drafters.domino` the same drafter is Domino and DominoTree.
"""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.config import ModelConfig
from graft_jax.drafters.base import Draft, Params
from graft_jax.models import cache as kv
from graft_jax.models import dflash, transformer
from graft_jax.models.cache import KVCache
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.sampling import first_argmax
from graft_jax.tree.best_first import BestFirst, grow
from graft_jax.tree.structure import DraftTree, chain, truncate
from graft_jax.types import Array, Bool, Float, Int
from pallas_kernels import dispatch, topk_rows


class Slots(flax.struct.PyTreeNode):
    """What one block says: slot d is about the node at depth d + 1."""

    hidden: Float[Array, "B D M"]
    logits: Float[Array, "B D V"]


@runtime_checkable
class Policy(Protocol):
    """Makes a tree of a block. A frozen dataclass; never draws, at any temperature."""

    @property
    def budget(self) -> int:
        """Nodes beside the root; no more slots than that are read."""
        ...

    def __call__(
        self, config: DFlashConfig, params: Params, slots: Slots, root: Int[Array, "B"], active: Bool[Array, "B"]
    ) -> Draft: ...


class DFlashState(flax.struct.PyTreeNode):
    """Between rounds: keys and values of the target's features at the `length` committed positions."""

    cache: KVCache
    length: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class DFlash:
    """Drafts with a DFlash backbone.

    The root is the block's anchor: features cover the positions before it, and of the root only its token is
    known. All accepted rows of a round enter the cache in `observe`.

    Attributes:
        config: of the drafter.
        target: whose embedding and head it uses.
        policy: makes the tree.
        unlikely: what becomes of nodes whose path is less probable than `Params.thresholds[0]`: "keep" has no
            threshold, "drop" drops them, and "mark" keeps them for what slots `Graft` has left. With a threshold
            the draft's stage is the number of the other nodes.
        attention_block: see `layers.attend`.
        cache_dtype: of the keys and values.
    """

    config: DFlashConfig
    target: ModelConfig
    policy: Policy
    unlikely: Literal["keep", "mark", "drop"] = "keep"
    attention_block: int = 0
    cache_dtype: str = "float32"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def wants_logits(self) -> bool:
        return False

    @property
    def capacity(self) -> int:
        return self.policy.budget

    @property
    def max_depth(self) -> int:
        return min(self.config.num_drafted, self.policy.budget)

    def init(self, params, batch, cache_size, memory):
        cache = kv.init(self.config.model, batch, cache_size, jnp.dtype(self.cache_dtype))
        return DFlashState(cache, jnp.zeros(batch, jnp.int32))

    def memory(self, state):
        return None

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        return self._extend(params, state, taps, valid.sum(axis=1, dtype=jnp.int32))

    def observe(self, params, state, tree, verdict, taps, logits):
        accepted = tuple(jnp.take_along_axis(tap, verdict.path[:, :, None], axis=1) for tap in taps)
        return self._extend(params, state, accepted, jnp.where(verdict.active, verdict.count, 0))

    def draft(self, params, state, root, length, active):
        outputs = dflash.hidden(
            self.config, params.drafter, params.target.embed, root, state.cache, length, self.attention_block
        )
        first = self.config.first_slot
        outputs = outputs[:, first : first + self.max_depth]
        slots = Slots(outputs, transformer.logits(self.target, params.target, outputs))
        draft = self.policy(self.config, params, slots, root, active)
        draft = draft.replace(forwards=active.astype(jnp.int32))
        if self.unlikely == "keep":
            return draft, state
        draft = draft.replace(stage=_likely(draft.tree, params.thresholds[0]))
        return (draft.replace(tree=truncate(draft.tree, draft.stage)) if self.unlikely == "drop" else draft), state

    def _extend(self, params, state: DFlashState, taps, count: Int[Array, "B"]) -> DFlashState:
        """Adds the next rows of features, of which the first `count` are committed."""
        column = jnp.broadcast_to(jnp.arange(taps[0].shape[1])[None, :], taps[0].shape[:2])
        made = dflash.context(self.config, params.drafter, taps, state.length[:, None] + column)
        return DFlashState(kv.commit(state.cache, made, column, state.length), state.length + count)


@dataclasses.dataclass(frozen=True)
class Chain:
    """The best token of every slot (DFlash)."""

    budget: int

    def __call__(self, config, params, slots, root, active):
        tokens = first_argmax(slots.logits)
        log_probs = slots.logits.max(axis=-1) - jax.nn.logsumexp(slots.logits, axis=-1)
        return scored_chain(root, tokens, log_probs, self.budget, active)


@dataclasses.dataclass(frozen=True)
class Marginal:
    """The most probable paths where slots count as independent (DDTree); at temperature 1, as in the paper.

    Attributes:
        children: successors of a node; None takes all that could enter the tree.
        kernels: implementation of the kernels, as in `SuccessorTable`.
    """

    budget: int
    children: int | None = None
    kernels: str | None = None

    def __post_init__(self):
        dispatch.check(self.kernels)

    def __call__(self, config, params, slots, root, active):
        C = min(self.children or self.budget, self.budget, slots.logits.shape[-1])
        values, tokens = topk_rows(slots.logits, C, implementation=self.kernels)
        log_probs = values - jax.nn.logsumexp(slots.logits, axis=-1, keepdims=True)
        return shared_tree(self.budget, root, tokens, log_probs, active)


def scored_chain(
    root: Int[Array, "B"],
    tokens: Int[Array, "B D"],
    log_probs: Float[Array, "B D"],
    budget: int,
    active: Bool[Array, "B"],
) -> Draft:
    """A chain of all slots; the capacity is `budget`, whatever their number."""
    D = tokens.shape[1]
    behind = ((0, 0), (0, budget - D))
    score = jnp.cumsum(jnp.minimum(log_probs, 0.0), axis=1)
    tree = chain(root, jnp.pad(tokens, behind), jnp.where(active, D, 0))
    scores = jnp.pad(score, behind, constant_values=-jnp.inf)
    scores = jnp.concatenate([jnp.zeros_like(score[:, :1]), scores], axis=1)
    # What is no node must not look deeper than the deepest one.
    tree = tree.replace(score=scores, depth=jnp.minimum(tree.depth, D))
    none = jnp.zeros_like(root)
    return Draft(tree, none, jnp.where(active[:, None], jnp.exp(score), jnp.nan), none)


def shared_tree(
    budget: int,
    root: Int[Array, "B"],
    tokens: Int[Array, "B D C"],
    log_probs: Float[Array, "B D C"],
    active: Bool[Array, "B"],
) -> Draft:
    """The most probable paths where all nodes of one depth have the same successors."""
    B, D, C = tokens.shape

    def expand(carry, depth, lanes):
        def here(x: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(x, depth, axis=1)
            return jnp.broadcast_to(row, (B, budget, C))

        return here(tokens), here(log_probs), carry

    return grow(BestFirst(D, budget, C), root, tokens[:, 0], log_probs[:, 0], expand, (), active)


def _likely(tree: DraftTree, floor: Float[Array, ""]) -> Int[Array, "B"]:
    """How many nodes have paths as probable as `floor`: the first ones, for nodes stand in order of score."""
    likely = tree.valid & (tree.score >= jnp.log(jnp.maximum(floor, 0.0)))
    return likely[:, 1:].sum(axis=1, dtype=jnp.int32)
