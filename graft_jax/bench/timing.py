"""Timing that can be trusted on a noisy machine: medians, interleaved, after a warm-up."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp


def interleaved(functions: Mapping[str, Callable[[], object]], repeats: int = 9) -> dict[str, float]:
    """Median seconds of each function, called in turn so that a slow spell hits all of them.

    Functions return arrays, which are waited for. Each is called once before, to warm up.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def looped(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A program that calls `function(first, *rest)` `count` times on the device, each after the one before.

    So the host's share of a call, which is longer than many a kernel, is paid once. Its time over `count` is that of a
    call.
    """

    def run(first, *rest):
        def step(_, carry):
            # The barrier ties the arguments to the last results: no call can be hoisted, dropped or merged.
            first, seen = jax.lax.optimization_barrier(carry)
            results = jax.lax.optimization_barrier(function(first, *rest))
            return first, seen + sum(_numbers(results))

        return jax.lax.fori_loop(0, count, step, (first, jnp.float32(0)))[1]

    return jax.jit(run)


def carried(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Like `looped`, for `function(carry, *rest)` that returns the next carry: what it writes, it writes in place."""

    def run(carry, *rest):
        def step(_, carry):
            return function(jax.lax.optimization_barrier(carry), *rest)

        # Of the result little leaves the device; what is carried in is copied once for all calls.
        return _numbers(jax.lax.fori_loop(0, count, step, carry))

    return jax.jit(run)


def _numbers(tree: Any) -> list[jax.Array]:
    """One entry of every array; keys and empty arrays have none."""
    leaves = [
        leaf for leaf in jax.tree.leaves(tree) if leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    return [leaf.reshape(-1)[0].astype(jnp.float32) for leaf in leaves]
