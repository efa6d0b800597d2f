"""Compiled programs of one decoder, and what compiling them cost.

Programs are compiled ahead of their first call, so that no timing hides a compile, and are kept by name
and batch size: a decoder needs a handful, whatever lengths, seeds, temperatures and stop sets come later.
"""

import concurrent.futures
import ctypes
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from graft_jax import decode
from graft_jax.decode import DecodeSpec
from pallas_kernels import dispatch

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


class Program(NamedTuple):
    """A function of `decode` to be called with `args`, of which those at `donate` are used up."""

    key: tuple
    function: Callable
    donate: tuple[int, ...]
    args: tuple  # abstract ones do for compiling


class Programs:
    """Calls the functions of `decode` for one spec; state arguments are donated."""

    def __init__(self, spec: DecodeSpec):
        self.spec = spec
        self.compiled: dict[tuple, Any] = {}
        self.compile_seconds = 0.0
        self.kernels: dict[str, str] = {}  # kernel -> the implementation that the programs so far hold

    def prepare(self, init_args: tuple, chunk_sizes: Iterable[int]) -> None:
        """Compiles what a generation needs, before its cache is allocated: so the two peaks of memory do not meet.

        Args:
            init_args: what `init` will be called with.
            chunk_sizes: of the prefill chunks to come.
        """
        params, batch, sizes = init_args[0], init_args[1].shape[0], sorted(set(chunk_sizes))
        if {("run", batch), *(("prefill", batch, size) for size in sizes)} <= self.compiled.keys():
            return  # tracing the state's shapes takes longer than a round of a small model
        state = jax.eval_shape(lambda *args: decode.init_state(self.spec, *args), *init_args)
        start = time.perf_counter()
        wanted = [self._prefill(size, params, state) for size in sizes] + [self._run(params, state)]
        wanted = [program for program in wanted if program.key not in self.compiled]
        # One is compiled, or read from the disk, while the next is traced.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            made = [pool.submit(self._lower(program).compile) for program in wanted]
        self.compiled |= {program.key: future.result() for program, future in zip(wanted, made)}
        _release_memory()
        self.compile_seconds += time.perf_counter() - start

    def init(self, *args: Any) -> decode.DecodeState:
        """`decode.init_state`. A memory is donated."""
        batch, has_memory = args[1].shape[0], args[-1] is not None
        return self._call(Program(("init", batch, has_memory), decode.init_state, (7,), args))

    def prefill(self, params, state, start: int, size: int) -> decode.DecodeState:
        return self._call(self._prefill(size, params, state, start))

    def run(self, params, state, rounds: int) -> decode.DecodeState:
        return self._call(self._run(params, state, rounds))

    def next_scores(self, params, state) -> jax.Array:
        return self._call(Program(("next_scores", state.tokens.shape[0]), decode.next_scores, (), (params, state)))

    # The state is donated: its cache is the largest array there is, and is written in place.

    def _prefill(self, size: int, params, state, start: int = 0) -> Program:
        def chunk(spec, params, state, start):
            return decode.prefill_chunk(spec, params, state, start, size)

        return Program(("prefill", state.tokens.shape[0], size), chunk, (1,), (params, state, jnp.int32(start)))

    def _run(self, params, state, rounds: int = 0) -> Program:
        return Program(("run", state.tokens.shape[0]), decode.run, (1,), (params, state, jnp.int32(rounds)))

    def _lower(self, program: Program) -> Any:
        def bound(*args):
            return program.function(self.spec, *args)

        with dispatch.recording() as record:
            lowered = jax.jit(bound, donate_argnums=program.donate).lower(*program.args)
        self.kernels |= dispatch.chosen_for(dispatch.platform_name(), record)
        return lowered

    def _call(self, program: Program) -> Any:
        if program.key not in self.compiled:
            start = time.perf_counter()
            self.compiled[program.key] = self._lower(program).compile()
            _release_memory()
            self.compile_seconds += time.perf_counter() - start
        return self.compiled[program.key](*program.args)


def _release_memory() -> None:
    """Gives back what the compiler freed: glibc would keep some 200 MB for the life of the process."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
