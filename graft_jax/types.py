"""Shape letters, array aliases and the reasons for which a row stops.

Shape letters, used in annotations, einsums and comments everywhere:
B batch, T query rows, S cache length, N tree nodes, D tree depth, W frontier lanes, L layers,
H query heads, K key/value heads, E head width, M model width, F feed-forward width, V vocabulary,
C candidates, G GRU width, R correction rank.
"""

import enum

import jax
from jaxtyping import Bool, Float, Int, UInt32

Array = jax.Array

__all__ = ["Array", "Bool", "Float", "Int", "StopReason", "UInt32"]


class StopReason(enum.IntEnum):
    """Why a row ended. The numbers live in the decode state, the names in results."""

    RUNNING = 0
    STOP = 1  # a stop token was committed
    LENGTH = 2  # max_new_tokens or the end of the cache was reached
    INTERRUPTED = 3  # the caller ended the generation between two slices

    @property
    def label(self) -> str:
        return self.name.lower()
