"""Filling a retrieval template from the successor table: all levels of dependent lookups at once."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.retrieval_lookup import pallas_tpu, pallas_triton, reference


def retrieval_lookup(
    levels: Sequence[tuple[jax.Array, jax.Array | None]],
    context: jax.Array,
    parents: tuple[int, ...],
    ranks: tuple[int, ...],
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The tokens of a template's nodes under each context.

    A node's token is the successor of its rank after the tokens up to its parent, taken from the longest suffix of
    these that the table knows. Nothing is read outside the table for any id: a token outside the vocabulary counts
    as absent, and what hangs below an absent one is absent.

    Args:
        levels: successors int32 [R, C] and tags uint32 [R] of the contexts of O, ..., 2, 1 tokens. R is a power of
            two but for the last level, whose rows are the vocabulary and need no tags.
        context: int32 [A, O], the last tokens up to the root, oldest first; negative where there are fewer.
        parents: of the n nodes; the root is 0 and the first node 1.
        ranks: of the n nodes among their parent's successors, below C.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None takes the platform's own.

    Returns:
        Tokens, int32 [A, n], 0 where invalid, and validity, bool [A, n].

    Raises:
        ValueError: shapes or ranks do not fit, or the name is unknown.
        NotImplementedError: the named implementation does not take these arrays.
    """
    O, width = context.shape[-1], levels[0][0].shape[1]
    if O != len(levels):
        raise ValueError(f"{context.shape=} must hold as many tokens as there are levels, {len(levels)}")
    for i, (successors, tags) in enumerate(levels):
        rows, is_last = successors.shape[0], i == O - 1
        if successors.shape[1] != width or is_last != (tags is None) or (not is_last and rows & (rows - 1)):
            raise ValueError(f"level {i} of {O}: {successors.shape=} needs {width} columns, a power of two of rows "
                             f"and tags, or no tags in the last")  # fmt: skip
    if ranks and max(ranks) >= width:
        raise ValueError(f"rank {max(ranks)} must be below the {width} successors of a row")
    static: Any = {"parents": tuple(parents), "ranks": tuple(ranks)}
    xla = functools.partial(reference.retrieval_lookup, **static)
    if not ranks or not context.shape[0]:
        return xla(levels, context)
    return dispatch.call(
        "retrieval_lookup", implementation, xla,
        {
            name: dispatch.Version(
                functools.partial(module.retrieval_lookup, **static), module.unsupported(levels, context, **static)
            )
            for name, module in ((dispatch.TRITON, pallas_triton), (dispatch.TPU, pallas_tpu))
        },
        tuple(levels), context,
    )  # fmt: skip
