"""Compiled programs of one decoder, and what compiling them cost.

Programs are compiled ahead of their first call, so that no timing hides a compile, and are kept by name
and batch size: a decoder needs a handful, whatever lengths, seeds, temperatures and stop sets come later.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from graft_jax import decode
from graft_jax.decode import DecodeSpec

CHUNKS = (256, 64, 16)  # prefill chunk sizes


def chunk_plan(length: int) -> list[tuple[int, int]]:
    """(start, size) of the chunks that hold `length` positions; the last one is the smallest that holds the rest."""
    plan, start = [], 0
    while start < length:
        left = length - start
        size = next((size for size in CHUNKS if left >= size), CHUNKS[-1])
        plan.append((start, size))
        start += size
    return plan


class Programs:
    """Calls the functions of `decode` for one spec; state arguments are donated."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.compiled: dict[tuple, Any] = {}
        self.compile_seconds = 0.0

    def init(self, *args: Any) -> decode.DecodeState:
        """`decode.init_state`. A memory is donated."""
        batch, has_memory = args[1].shape[0], args[-1] is not None
        return self._call(("init", batch, has_memory), decode.init_state, (7,), args)

    def prefill(self, params, state, start: int, size: int) -> decode.DecodeState:
        def chunk(spec, params, state, start):
            return decode.prefill_chunk(spec, params, state, start, size)

        # The state is donated: its cache is the largest array there is, and is written in place.
        start = jax.numpy.int32(start)
        return self._call(("prefill", state.tokens.shape[0], size), chunk, (1,), (params, state, start))

    def run(self, params, state, rounds: int) -> decode.DecodeState:
        rounds = jax.numpy.int32(rounds)
        return self._call(("run", state.tokens.shape[0]), decode.run, (1,), (params, state, rounds))

    def next_scores(self, params, state) -> jax.Array:
        return self._call(("next_scores", state.tokens.shape[0]), decode.next_scores, (), (params, state))

    def _call(self, key: tuple, function: Callable, donate: tuple[int, ...], args: tuple) -> Any:
        if key not in self.compiled:
            start = time.perf_counter()

            def bound(*args):
                return function(self.spec, *args)

            self.compiled[key] = jax.jit(bound, donate_argnums=donate).lower(*args).compile()
            _release_memory()
            self.compile_seconds += time.perf_counter() - start
        return self.compiled[key](*args)


def _release_memory() -> None:
    """Gives back what the compiler freed: glibc would keep some 200 MB for the life of the process."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
