"""Gates: stop drafting where the tree's confidence is low (Graft, section 3.1; ECHO; DDD)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from graft_jax.types import Array, Bool, Float

# Thresholds of Graft, table 11 (Qwen3-8B on MT-Bench), for checkpoints 0, 1 and 5 of a tree of depth 8.
PAPER_DEPTH, PAPER_DEPTHS, PAPER_THRESHOLDS = 8, (0, 1, 5), (0.14, 0.13, 0.49)
OPEN = -1.0  # a threshold that no confidence is below


@dataclasses.dataclass(frozen=True)
class Gates:
    """Checkpoints at which drafting may end.

    Attributes:
        depths: checkpoint d looks at the tree after d expansions of the first level.
        measure: of confidence: "best", the probability of the most probable path (Graft's and ECHO's c_d);
            or "beam", the sum over the beam (the exponential of DDD's H).
    """

    depths: tuple[int, ...] = ()
    measure: Literal["best", "beam"] = "best"

    def __post_init__(self):
        if list(self.depths) != sorted(set(self.depths)) or any(depth < 0 for depth in self.depths):
            raise ValueError(f"gate depths {self.depths} must rise from at least 0")
        if self.measure not in ("best", "beam"):
            raise ValueError(f"gate measure {self.measure!r} must be 'best' or 'beam'")

    def confidence(self, scores: Float[Array, "B W"]) -> Float[Array, "B"]:
        """Of a level's cumulative log-probabilities (-inf where a lane is empty)."""
        return jnp.exp(scores.max(axis=1) if self.measure == "best" else jax.nn.logsumexp(scores, axis=1))

    def closes(self, depth: Array, confidence: Float[Array, "B"], thresholds: Float[Array, "n"]) -> Bool[Array, "B"]:
        """Whether a checkpoint stands at `depth` (traced) and closes: at or below its threshold (equation 7)."""
        if not self.depths:
            return jnp.zeros(confidence.shape, bool)
        here = jnp.array(self.depths) == depth
        return (here[None, :] & (confidence[:, None] <= thresholds[None, :])).any(axis=1)

    def stage(self, stopped: Bool[Array, "B"], depth: Array, stage: Array) -> Array:
        """Stage numbers: 0 where drafting went to its end, i + 1 where gate i closed."""
        if not self.depths:
            return stage
        index = jnp.argmax(jnp.array(self.depths) == depth).astype(jnp.int32) + 1
        return jnp.where(stopped, index, stage)


def scaled(depth: int) -> tuple[int, ...]:
    """The paper's checkpoints for a tree of another depth: 0, 1, and five eighths of the way."""
    deep = round(PAPER_DEPTHS[2] * depth / PAPER_DEPTH)
    return tuple(sorted({d for d in (0, 1, deep) if d < depth} or {0}))


def default_thresholds(depths: tuple[int, ...]) -> tuple[float, ...]:
    """The paper's threshold for the checkpoints 0 and 1, and that of 5 for all deeper ones."""
    return tuple(PAPER_THRESHOLDS[min(depth, 2)] for depth in depths)


def kept_nodes(depth: int, budget: int, tree_depth: int) -> int:
    """K_draft: how many of `budget` nodes stay drafted when the gate at `depth` closes.

    Table 7 keeps 8, 24 and 40 of 60 at the checkpoints 0, 1 and 5 of a tree of depth 8, and all 60 at its
    end; other depths lie on the line between, other budgets in proportion, at least one node and at
    most all.
    """
    marks, shares = (*PAPER_DEPTHS, PAPER_DEPTH), (8 / 60, 24 / 60, 40 / 60, 1.0)
    at = depth * PAPER_DEPTH / tree_depth
    for (x0, y0), (x1, y1) in zip(zip(marks, shares), zip(marks[1:], shares[1:])):
        if at <= x1:
            share = y0 + (y1 - y0) * (at - x0) / (x1 - x0)
            return max(1, min(budget, round(share * budget)))
    return budget
