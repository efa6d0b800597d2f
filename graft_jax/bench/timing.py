"""Timing that can be trusted on a noisy machine: medians, interleaved, after a warm-up."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


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
