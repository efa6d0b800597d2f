"""A round at real shapes with random weights: its stages, each alone and on the device, beside the fused round.

Random weights accept next to nothing, but a round costs the same whatever is accepted.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax import decode, sampling, verify
from graft_jax.bench.timing import carried, interleaved, looped
from graft_jax.decode import MAX_STOP_TOKENS, DecodeSpec, DecodeState
from graft_jax.drafters.base import Params
from graft_jax.drafters.graft import Graft
from graft_jax.models import cache as kv
from graft_jax.tree import structure

CHUNK = 64  # tokens of the prompt


def random_params(abstract: Params, thresholds: tuple[float, ...]) -> Params:
    """Weights of the given shapes: normal, small, no two arrays the same memory."""

    @functools.cache
    def pattern(shape, dtype):
        if jnp.issubdtype(dtype, jnp.integer):  # a drafter's vocabulary
            return jnp.arange(shape[0], dtype=dtype)
        return (0.02 * jax.random.normal(jax.random.key(len(shape)), shape, jnp.float32)).astype(dtype)

    made = jax.tree.map(lambda leaf: jnp.copy(pattern(leaf.shape, leaf.dtype)), abstract)
    return made.replace(thresholds=jnp.asarray(thresholds, jnp.float32))


def start(spec: DecodeSpec, params: Params, **settings: Any) -> DecodeState:
    """A row after a prompt of random tokens; a retrieval table knows successors of every token.

    Args:
        settings: of the sampling (see `sampling.make`).
    """
    rng, drafter = np.random.default_rng(0), spec.drafter
    memory = None
    if isinstance(drafter, Graft):
        *longer, last = drafter.table.init()
        full = jnp.asarray(rng.integers(0, spec.model.num_tokens, last.successors.shape), jnp.int32)
        memory = (None, (*longer, last.replace(successors=full)))
    prompt = jnp.asarray(rng.integers(0, spec.model.num_tokens, CHUNK), jnp.int32)
    tokens = jnp.zeros((1, spec.cache_size), jnp.int32).at[0, :CHUNK].set(prompt)
    length, stops = jnp.array([CHUNK]), jnp.full(MAX_STOP_TOKENS, -1)
    limit, budget = jnp.array([spec.max_length]), jnp.array([drafter.capacity])
    init = jax.jit(decode.init_state, static_argnums=0)
    state = init(spec, params, tokens, length, limit, budget, stops, sampling.make([0], **settings), memory)
    prefill = jax.jit(decode.prefill_chunk, static_argnums=(0, 4), donate_argnums=2)
    return prefill(spec, params, state, jnp.int32(0), CHUNK)


def fused(spec: DecodeSpec, params: Params, state: DecodeState, rounds: int, repeats: int) -> float:
    """Median seconds of a round inside `run`, from the same state each time."""
    run = jax.jit(lambda params, state: decode.run(spec, params, state, jnp.int32(rounds)).statistics.rounds)
    taken = int(run(params, state)[0])
    return interleaved({"run": lambda: run(params, state)}, repeats)["run"] / taken


def by_stage(spec: DecodeSpec, params: Params, state: DecodeState, calls: int, repeats: int) -> dict[str, float]:
    """Median seconds of each stage of one recorded round.

    "draft" is the drafter's model and its tree, "build" `Graft`'s filling and merging, "update" the table's.
    """
    drafter, root = spec.drafter, state.tokens[jnp.arange(1), state.length]
    active = state.active

    @jax.jit
    def round_parts(params, state):
        draft, _ = drafter.draft(params, state.draft, root, state.length, active)
        tree = structure.truncate(draft.tree, state.budget)
        logits, taps, block = decode._verify(spec, params, tree, state.cache, state.length, active)
        verdict = verify.accept(tree, logits, state.sampling, state.length, active, drafter.max_depth)
        return tree, logits, taps, block, verdict

    tree, logits, taps, block, verdict = round_parts(params, state)

    def commit(carry, tokens, block):
        state, path = carry
        cache = kv.commit(state.cache, block, path, state.length)
        after, _ = decode._append(state.replace(cache=cache), tokens, verdict.count, state.length + 1)
        # The next path depends on what was written, as in a round.
        return after.replace(reason=state.reason), path + (cache.values[0][0, 0, 0, 0] > 1e30).astype(jnp.int32)

    graft = drafter if isinstance(drafter, Graft) else None
    model, model_state = (drafter, state.draft) if graft is None else (graft.base, state.draft.base)
    stages: dict[str, tuple[Any, tuple]] = {
        "draft": (lambda root, params, state, length: model.draft(params, state, root, length, active)[0],
                  (root, params, model_state, state.length)),
        "verify": (lambda tree, params, state: decode._verify(spec, params, tree, state.cache, state.length, active)[0],
                   (tree, params, state)),
        "accept": (lambda logits, tree, state: verify.accept(
            tree, logits, state.sampling, state.length, active, drafter.max_depth), (logits, tree, state)),
        "commit": (commit, ((state, verdict.path), verdict.tokens, block)),
        "observe": (lambda taps, params, state, tree, verdict, logits: model.observe(
            params, state, tree, verdict, taps, logits), (taps, params, model_state, tree, verdict, logits)),
    }  # fmt: skip
    if graft is not None:
        stages |= _graft_stages(graft, state, tree, logits, verdict, model_state, params)
    in_place = ("commit", "update")
    programs = {
        name: (carried if name in in_place else looped)(function, calls) for name, (function, _) in stages.items()
    }
    seconds = interleaved(
        {name: functools.partial(program, *stages[name][1]) for name, program in programs.items()}, repeats
    )
    return {name: value / calls for name, value in seconds.items()}


def _graft_stages(graft: Graft, state: DecodeState, tree, logits, verdict, model_state, params):
    """What `Graft` adds to its base: filling and merging, and the table's update, in place."""

    def update(carry, tree, verdict):
        drafted, logits = carry
        return drafted.replace(table=graft.learn(drafted, tree, verdict, logits)), logits

    def draft(params, base_state, state):
        root = state.tokens[jnp.arange(1), state.length]
        return graft.base.draft(params, base_state, root, state.length, state.active)[0]

    # Parameters are arguments: as constants of the program they would be folded, at length.
    base = jax.jit(draft)(params, model_state, state)
    return {
        "build": (lambda base, state: graft.build(state, base).tree, (base, state.draft)),
        "update": (update, ((state.draft, logits), tree, verdict)),
    }


def summary(fused_seconds: float, stages: dict[str, float], plain_seconds: float) -> dict[str, float]:
    """What the figures say: the share of a round that is no product of target or drafter, and the like."""
    products = stages["verify"] + stages["draft"] + stages["observe"]
    return {
        "round_ms": fused_seconds * 1e3,
        "plain_ms": plain_seconds * 1e3,
        "outside_products": 1 - products / fused_seconds,
        "sum_of_stages": sum(stages.values()) / fused_seconds,
        "table_update_and_commit_ms": (stages.get("update", 0.0) + stages["commit"]) * 1e3,
        "build_ms": stages.get("build", 0.0) * 1e3,
        **{f"{name}_ms": value * 1e3 for name, value in stages.items()},
    }
