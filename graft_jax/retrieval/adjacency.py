"""The successor table: what the target said, the last times, after these tokens.

Row t of Graft's adjacency matrix holds the target's top-k tokens after token t (arXiv 2605.20104, section
3.2; Token Recycling). Beside that dense table of order 1 there may be hashed ones of order n, keyed by
the last n tokens: they know more and back off to shorter contexts where they hold nothing.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.types import Array, Bool, Float, Int, UInt32
from pallas_kernels import dispatch, topk_rows
from pallas_kernels.retrieval_lookup import reference

EMPTY = -1  # no successor known; also an absent token in a context


class Level(flax.struct.PyTreeNode):
    """Rows of one context length. `tags` tells contexts apart that share a row; None in the dense table."""

    successors: Int[Array, "R C"]
    tags: UInt32[Array, "R"] | None


@dataclasses.dataclass(frozen=True)
class SuccessorTable:
    """Settings and operations; the contents are a tuple of `Level`, longest context first.

    Attributes:
        num_tokens: V, the vocabulary.
        order: longest context, in tokens. 1 is the paper's adjacency matrix.
        width: C, successors kept a row.
        log2_rows: each hashed level has 2**log2_rows rows.
        kernels: how templates are filled and successors chosen: one of `pallas_kernels.IMPLEMENTATIONS`, or None
            for the platform's own.
    """

    num_tokens: int
    order: int = 3
    width: int = 8
    log2_rows: int = 16
    kernels: str | None = None

    def __post_init__(self):
        if not 1 <= self.order <= 8:
            raise ValueError(f"{self.order=} must be between 1 and 8 tokens")
        if self.width < 1 or self.num_tokens < self.width:
            raise ValueError(f"{self.width=} must be between 1 and {self.num_tokens=}")
        if not 1 <= self.log2_rows <= 28:
            raise ValueError(f"{self.log2_rows=} must be between 1 and 28")
        dispatch.check(self.kernels)

    def init(self) -> tuple[Level, ...]:
        """An empty table."""

        return tuple(self.init_level(order) for order in range(self.order, 0, -1))

    def init_level(self, order: int) -> Level:
        """An empty level of contexts of so many tokens."""
        rows = self.num_tokens if order == 1 else 2**self.log2_rows
        successors = jnp.full((rows, self.width), EMPTY, jnp.int32)
        return Level(successors, None if order == 1 else jnp.zeros(rows, jnp.uint32))

    def pairs(self, levels: tuple[Level, ...]) -> tuple[tuple[Array, Array | None], ...]:
        """The contents as `pallas_kernels.retrieval_lookup` takes them."""
        return tuple((level.successors, level.tags) for level in levels)

    def choose(self, logits: Float[Array, "*N V"]) -> tuple[Int[Array, "*N C"], Float[Array, "*N C"]]:
        """A row's contents by the target's logits: its best tokens and their probabilities, best first."""
        values, ids = topk_rows(logits, self.width, implementation=self.kernels)
        return ids, jnp.exp(values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    def lookup(self, levels: tuple[Level, ...], context: Int[Array, "*N O"]) -> Int[Array, "*N C"]:
        """Successors, best first, of the longest known suffix of each context; EMPTY where none is.

        Args:
            context: the last `order` tokens, oldest first; EMPTY where there are fewer.
        """
        return reference.lookup(self.pairs(levels), context)

    def update(
        self,
        levels: tuple[Level, ...],
        context: Int[Array, "n O"],
        successors: Int[Array, "n C"],
        write: Bool[Array, "n"],
        preferred: Bool[Array, "n"],
    ) -> tuple[Level, ...]:
        """Overwrites the rows of every order with what the target just said.

        Where several entries write one row, a `preferred` one wins, then the later one.
        """
        n = context.shape[0]
        rank = jnp.arange(n) + n * preferred.astype(jnp.int32)

        def put(order: int, level: Level) -> Level:
            row, tag, known = reference.locate(context, order, level.successors.shape[0])
            wanted = write & known
            rival = wanted[None, :] & (row[:, None] == row[None, :]) & (rank[None, :] > rank[:, None])
            return _scatter(level, row, tag, successors, wanted & ~rival.any(axis=1))

        return tuple(put(order, level) for order, level in zip(range(self.order, 0, -1), levels))

    def update_summed(
        self,
        levels: tuple[Level, ...],
        context: Int[Array, "n O"],
        successors: Int[Array, "n C"],
        weights: Float[Array, "n C"],
        write: Bool[Array, "n"],
    ) -> tuple[Level, ...]:
        """Overwrites rows; entries that share a row add their weights (probabilities) by successor.

        This is the prompt's update: a token that stands several times gets the successors with the
        largest summed probability; ties go to the lower id.
        """

        def put(order: int, level: Level) -> Level:
            row, tag, known = reference.locate(context, order, level.successors.shape[0])
            row = jnp.where(write & known, row, level.successors.shape[0])
            merged = _sum_by_row(row, successors, weights)
            # All entries of a row carry the same merged successors; one of them, the last, writes.
            n = row.shape[0]
            later = (row[:, None] == row[None, :]) & (jnp.arange(n)[None, :] > jnp.arange(n)[:, None])
            return _scatter(level, row, tag, merged, write & known & ~later.any(axis=1))

        return tuple(put(order, level) for order, level in zip(range(self.order, 0, -1), levels))


def _scatter(level: Level, row, tag, successors, write) -> Level:
    """Writes rows; the caller leaves at most one `write` a row, so the order does not matter."""
    row = jnp.where(write, row, level.successors.shape[0])  # out of range is dropped
    tags = level.tags
    if tags is not None:
        tags = tags.at[row].set(tag, mode="drop", unique_indices=False)
    return Level(level.successors.at[row].set(successors, mode="drop"), tags)


def _sum_by_row(row: Int[Array, "n"], successors: Int[Array, "n C"], weights: Float[Array, "n C"]) -> Int[Array, "n C"]:
    """For every entry, the C successors with the largest summed weight among the entries of its row."""
    n, C = successors.shape
    rows = jnp.repeat(row, C)
    # Equal (row, successor) pairs become neighbours; the first of each run carries the run's sum.
    rows, ids, weights = jax.lax.sort((rows, successors.reshape(-1), weights.reshape(-1)), num_keys=2)
    first = jnp.concatenate([jnp.ones(1, bool), (rows[1:] != rows[:-1]) | (ids[1:] != ids[:-1])])
    run = jnp.cumsum(first) - 1
    total = jax.ops.segment_sum(weights, run, num_segments=n * C)[run]
    total = jnp.where(first & (ids != EMPTY), total, -1.0)
    # Best first within each row.
    rows, negative, ids = jax.lax.sort((rows, -total, ids), num_keys=3)
    start = jnp.searchsorted(rows, row)  # [n]
    at = start[:, None] + jnp.arange(C)[None, :]
    inside = jnp.take(rows, at, mode="clip") == row[:, None]
    good = inside & (at < n * C) & (jnp.take(negative, at, mode="clip") <= 0)
    return jnp.where(good, jnp.take(ids, at, mode="clip"), EMPTY)
