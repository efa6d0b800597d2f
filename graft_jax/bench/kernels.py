"""Inputs of each kernel at its named shapes, for numerics and timing, and what its time cannot go below."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.bench.timing import interleaved, looped
from graft_jax.tree import templates
from pallas_kernels import retrieval_lookup, topk_rows, topm_score
from pallas_kernels.retrieval_lookup import specs as lookup_specs
from pallas_kernels.topk_rows import specs as topk_specs
from pallas_kernels.topm_score import specs as topm_specs

# Peak memory bytes/s and dense bfloat16 operations/s, from the makers' data sheets.
PEAKS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "TPU v5 lite": (819e9, 197e12),
         "TPU v6 lite": (1640e9, 918e12)}  # fmt: skip
SCORE_TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-3}


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A kernel at a shape.

    Attributes:
        run: takes `implementation` and `args`.
        args: random arrays; the first is the one that timing ties calls together with.
        bytes, flops: that any implementation must move and do.
    """

    kernel: str
    shape: str
    run: Callable[..., Any]
    args: tuple
    bytes: int
    flops: int = 0

    def floor_seconds(self, device_kind: str) -> float | None:
        """The least time on a device, None for one whose peaks are not known."""
        for name, (bandwidth, rate) in PEAKS.items():
            if name in device_kind:
                return max(self.bytes / bandwidth, self.flops / rate)
        return None


def cases(*, tiny: bool = False) -> list[KernelCase]:
    """Every kernel at every named shape; `tiny` ones serve to see that the benchmark runs."""
    made = []
    for name, spec in topk_specs.SPECS.items():
        spec = spec._replace(rows=3, vocabulary=700, k=min(spec.k, 8)) if tiny else spec
        made.append(_topk(name, spec))
    for name, spec in topm_specs.SPECS.items():
        made.append(_topm(name, spec._replace(lanes=5, rank=16, candidates=12, children=4) if tiny else spec))
    for name, spec in lookup_specs.SPECS.items():
        spec = spec._replace(points=2, vocabulary=300, nodes=12, log2_rows=8) if tiny else spec
        made.append(_lookup(name, spec))
    return made[::4] if tiny else made


def _topk(name: str, spec: topk_specs.Spec) -> KernelCase:
    logits = jax.random.normal(jax.random.key(0), (spec.rows, spec.vocabulary))
    return KernelCase("topk_rows", name, functools.partial(topk_rows, k=spec.k), (logits,), logits.nbytes)


def _topm(name: str, spec: topm_specs.Spec, dtype=jnp.bfloat16) -> KernelCase:
    B, W, R, M, children = spec
    keys = jax.random.split(jax.random.key(1), 4)
    hidden, state = jax.random.normal(keys[0], (B, R)), jax.random.normal(keys[1], (B, W, R))
    rows = (jax.random.normal(keys[2], (B, M, R)) * R**-0.5).astype(dtype)
    base = 3 * jax.random.normal(keys[3], (B, M))
    tokens = jnp.broadcast_to(jnp.arange(M)[None, :] * 7, (B, M))

    def run(state, hidden, rows, base, tokens, implementation=None):
        return topm_score(hidden, state, rows, base, tokens, children, implementation=implementation)

    args = (state, hidden, rows, base, tokens)
    return KernelCase("topm_score", name, run, args, sum(x.nbytes for x in args), 2 * B * W * R * M)


def _lookup(name: str, spec: lookup_specs.Spec) -> KernelCase:
    rng = np.random.default_rng(2)
    template = (templates.GRAFT_FULL if spec.nodes > 31 else templates.NARROW).prefix(spec.nodes)
    levels = []
    for order in range(spec.order, 0, -1):
        rows = spec.vocabulary if order == 1 else 2**spec.log2_rows
        table = jnp.asarray(rng.integers(0, spec.vocabulary, (rows, spec.width)), jnp.int32)
        levels.append((table, None if order == 1 else jnp.zeros(rows, jnp.uint32)))
    context = jnp.asarray(rng.integers(0, spec.vocabulary, (spec.points, spec.order)), jnp.int32)

    def run(context, levels, implementation=None):
        return retrieval_lookup(levels, context, template.parents, template.ranks, implementation=implementation)

    # A sector of 32 bytes holds a row of 8; a tag is one more sector.
    moved = spec.points * len(template) * 32 * (2 * spec.order - 1)
    return KernelCase("retrieval_lookup", name, run, (context, tuple(levels)), moved)


def numerics(case: KernelCase, implementation: str | None) -> dict[str, Any]:
    """Compares with XLA's version: integers exactly, scores within the tolerance of their dtype.

    Returns:
        `equal`, and `score_error`, the largest difference of a float result. Where two scores are closer than the
        tolerance their order may differ, and the tokens count as equal.
    """
    wanted = jax.jit(functools.partial(case.run, implementation="xla"))(*case.args)
    found = jax.jit(functools.partial(case.run, implementation=implementation))(*case.args)
    if case.kernel != "topm_score":
        equal = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)))
        return {"equal": bool(equal), "score_error": 0.0}
    (tokens, scores), (other_tokens, other_scores) = found, wanted
    tolerance = SCORE_TOLERANCE[str(case.args[2].dtype)]
    error = float(jnp.abs(scores - other_scores).max())
    gaps = np.abs(np.diff(np.asarray(other_scores), axis=2, append=-np.inf, prepend=np.inf))
    clear = np.minimum(gaps[:, :, :-1], gaps[:, :, 1:]) > 2 * tolerance
    # Behind the last child a closer one may wait, which only the full order would tell.
    clear[:, :, -1] = False
    same = (np.asarray(tokens) == np.asarray(other_tokens)) | ~clear
    return {"equal": bool(same.all() and error <= tolerance), "score_error": error}


def measure(case: KernelCase, implementations: Mapping[str, str | None], calls: int, repeats: int) -> dict[str, Any]:
    """Median microseconds of a call, by implementation, in turn."""
    programs = {
        label: looped(functools.partial(case.run, implementation=name), calls)
        for label, name in implementations.items()
    }
    seconds = interleaved({label: functools.partial(run, *case.args) for label, run in programs.items()}, repeats)
    floor = case.floor_seconds(jax.devices()[0].device_kind)
    return {
        **{f"{label}_us": value / calls * 1e6 for label, value in seconds.items()},
        "floor_us": None if floor is None else floor * 1e6,
        "bytes": case.bytes,
        "flops": case.flops,
    }
