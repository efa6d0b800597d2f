"""The contract of a drafter."""

from typing import Any, Protocol, runtime_checkable

import flax.struct

from graft_jax.tree.structure import Draft, DraftTree
from graft_jax.types import Array, Bool, Float, Int
from graft_jax.verify import Verdict

DraftState = Any  # a pytree that only its drafter understands
Memory = Any  # the part of it that outlives a generation; None where there is none


__all__ = ["Draft", "DraftState", "Drafter", "Memory", "Params"]


class Params(flax.struct.PyTreeNode):
    """Everything that rounds read and never write, together, for drafters share the target's embedding and head.

    Attributes:
        target: the target's weights.
        drafter: the drafter's weights.
        thresholds: one a gate (see `tree.gates`); another value compiles nothing.
    """

    target: Any
    drafter: Any = None
    thresholds: Any = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes trees. A frozen, hashable dataclass of settings, so that it is static under jit.

    All methods are pure and batched; rows that are not active must leave state and memory as they were.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual streams it wants (see `transformer.forward`)."""
        ...

    @property
    def wants_logits(self) -> bool:
        """Whether prefill must hand over the logits of every prompt row."""
        ...

    @property
    def capacity(self) -> int:
        """K, the most nodes a tree holds beside its root."""
        ...

    @property
    def max_depth(self) -> int:
        """D, the depth of the deepest tree."""
        ...

    def init(self, params: Params, batch: int, cache_size: int, memory: Memory) -> DraftState:
        """The state before a prompt.

        Args:
            cache_size: rows to allocate for what is kept by position: the longest text and a whole path.
            memory: what an earlier generation left, or None.
        """
        ...

    def memory(self, state: DraftState) -> Memory:
        """What should outlive this generation."""
        ...

    def prefill(
        self,
        params: Params,
        state: DraftState,
        tokens: Int[Array, "B T"],
        next_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
        taps: tuple[Float[Array, "B T M"], ...],
        logits: Float[Array, "B T V"] | None,
    ) -> DraftState:
        """Sees a chunk of the prompt. The valid rows of a batch row are a prefix of the chunk.

        The prompt's last token is not among them: it is the root of the first `draft`, and the last row's
        `next_tokens` entry. So what holds after a prompt holds after every round.
        """
        ...

    def draft(
        self,
        params: Params,
        state: DraftState,
        root: Int[Array, "B"],
        length: Int[Array, "B"],
        active: Bool[Array, "B"],
    ) -> tuple[Draft, DraftState]:
        """Proposes a tree under `root`, the token at position `length`."""
        ...

    def observe(
        self,
        params: Params,
        state: DraftState,
        tree: DraftTree,
        verdict: Verdict,
        taps: tuple[Float[Array, "B N M"], ...],
        logits: Float[Array, "B N V"],
    ) -> DraftState:
        """Learns what the target said of the tree. Rows of invalid nodes hold anything."""
        ...
