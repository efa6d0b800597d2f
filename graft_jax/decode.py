"""One speculative round as a pure function, and the loop around it.

`decode_step` drafts, verifies, accepts, commits and observes; `run` wraps it in one `while_loop`, so a
whole generation is one XLA program with no host inside. `generate` and `stream` both call `run`.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax import verify
from graft_jax.config import ModelConfig
from graft_jax.drafters.base import Drafter, DraftState, Memory, Params
from graft_jax.models import cache as kv
from graft_jax.models import transformer
from graft_jax.sampling import Sampling, scores
from graft_jax.tree import structure
from graft_jax.tree.structure import NUM_SOURCES, DraftTree
from graft_jax.types import Array, Bool, Float, Int, StopReason

MAX_STOP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """Everything about decoding that is static under jit.

    Attributes:
        model: the target.
        drafter: proposes trees.
        max_length: most tokens of a row, prompt and new ones together.
        row_buckets: numbers of tree rows that the target may verify at once; a round takes the smallest
            that holds its tree. The capacity itself is always one of them.
        cache_dtype: of the keys and values; float32 on a CPU (see `models.cache`).
        attention_block: cache entries that attention reads at a time; 0: all (see `layers.attend`).
    """

    model: ModelConfig
    drafter: Drafter
    max_length: int
    row_buckets: tuple[int, ...] = ()
    attention_block: int = 0
    cache_dtype: str = "float32"

    def __post_init__(self):
        if self.max_length < 2:
            raise ValueError(f"max_length={self.max_length} must be at least 2 tokens")

    @property
    def buckets(self) -> tuple[int, ...]:
        N = self.drafter.capacity + 1
        return (*sorted(rows for rows in set(self.row_buckets) if 0 < rows < N), N)

    @property
    def cache_size(self) -> int:
        """Rows to allocate: `dynamic_update_slice` clamps, so a whole path or chunk must fit behind the end."""
        unit = self.attention_block or 16
        return -(-(self.max_length + max(self.drafter.max_depth + 1, 16)) // unit) * unit


class Statistics(flax.struct.PyTreeNode):
    """Sums over the rounds of each row. Depth 0 is the root; what follows a stop token is not counted."""

    rounds: Int[Array, "B"]
    emitted: Int[Array, "B"]  # new tokens, the bonus included
    forwards: Int[Array, "B"]  # drafter forward passes
    drafted_by_source: Int[Array, "B 3"]
    accepted_by_source: Int[Array, "B 3"]
    drafted_by_depth: Int[Array, "B P"]
    accepted_by_depth: Int[Array, "B P"]
    histogram: Int[Array, "B P"]  # rounds by number of accepted nodes


class DecodeState(flax.struct.PyTreeNode):
    """A batch of rows in flight.

    Attributes:
        tokens: prompt and committed tokens; `tokens[b, length[b]]` is the root.
        length: tokens whose keys and values the cache holds; the root comes after them.
        prompt_length: tokens of the prompt.
        limit: prompt and new tokens at which the row ends.
        budget: tree nodes beside the root that a round may verify.
        stop_tokens: ids that end a row; padded with -1.
        reason: a `StopReason`.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    limit: Int[Array, "B"]
    budget: Int[Array, "B"]
    stop_tokens: Int[Array, "n"]
    reason: Int[Array, "B"]
    sampling: Sampling
    cache: kv.KVCache
    draft: DraftState
    statistics: Statistics

    @property
    def active(self) -> Bool[Array, "B"]:
        return self.reason == StopReason.RUNNING


def init_state(
    spec: DecodeSpec,
    params: Params,
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, "B"],
    limit: Int[Array, "B"],
    budget: Int[Array, "B"],
    stop_tokens: Int[Array, "n"],
    sampling: Sampling,
    memory: Memory = None,
) -> DecodeState:
    """The state before prefill.

    Args:
        tokens: prompts, left-aligned, padded with 0 to `spec.cache_size`.
        limit: at most `spec.max_length`.
        memory: what the drafter kept of an earlier generation.
    """
    B, P = tokens.shape[0], spec.drafter.max_depth + 1
    zero, by_depth = jnp.zeros(B, jnp.int32), jnp.zeros((B, P), jnp.int32)
    by_source = jnp.zeros((B, NUM_SOURCES), jnp.int32)
    return DecodeState(
        tokens=tokens, length=zero, prompt_length=prompt_length, limit=limit, budget=budget,
        stop_tokens=stop_tokens, reason=zero, sampling=sampling,
        cache=kv.init(spec.model, B, spec.cache_size, jnp.dtype(spec.cache_dtype)),
        draft=spec.drafter.init(params, B, spec.cache_size, memory),
        statistics=Statistics(zero, zero, zero, by_source, by_source, by_depth, by_depth, by_depth),
    )  # fmt: skip


def prefill_chunk(
    spec: DecodeSpec, params: Params, state: DecodeState, start: Int[Array, ""], size: int
) -> DecodeState:
    """Runs prompt positions `start ... start + size - 1` of all rows; chunks follow one another from 0.

    The last prompt token is left out: it is the root of the first round, so that every round, the first one
    too, starts from the same kind of state. A prompt of one token needs no prefill.

    Args:
        size: rows of the chunk, static; the last chunk may reach up to 15 rows behind the longest prompt.
    """
    B = state.tokens.shape[0]
    positions = jnp.broadcast_to((start + jnp.arange(size))[None, :], (B, size))
    padded = jnp.pad(state.tokens, ((0, 0), (0, 1)))
    tokens = jax.lax.dynamic_slice_in_dim(padded, start, size, axis=1)
    next_tokens = jax.lax.dynamic_slice_in_dim(padded, start + 1, size, axis=1)
    valid = positions < state.prompt_length[:, None] - 1
    causal = jnp.broadcast_to(jnp.tri(size, dtype=bool)[None], (B, size, size))
    cached = jnp.broadcast_to(start, (B,))
    out = transformer.forward(
        spec.model, params.target, tokens, positions, causal, state.cache, cached,
        spec.drafter.taps, spec.attention_block,
    )  # fmt: skip
    logits = None
    if spec.drafter.wants_logits:
        logits = transformer.logits(spec.model, params.target, out.hidden)
    return state.replace(
        length=state.length + valid.sum(axis=1, dtype=jnp.int32),
        cache=kv.commit_chunk(state.cache, out.block, start, valid),
        draft=spec.drafter.prefill(params, state.draft, tokens, next_tokens, positions, valid, out.taps, logits),
    )


def next_scores(spec: DecodeSpec, params: Params, state: DecodeState) -> Float[Array, "B V"]:
    """The scores among which plain decoding chooses the token after the root (see `sampling.scores`)."""
    root = state.tokens[jnp.arange(state.tokens.shape[0]), state.length]
    tree = structure.root_only(root)
    logits, _, _ = _target(spec, params, tree, state.cache, state.length)
    return scores(logits[:, 0], state.sampling, state.length + 1)


def decode_step(spec: DecodeSpec, params: Params, state: DecodeState) -> DecodeState:
    """One round: draft, verify, accept, commit, observe. Pure; rows that are done stay as they are."""
    active = state.active
    rows = jnp.arange(state.tokens.shape[0])
    root = state.tokens[rows, state.length]
    with jax.named_scope("draft"):
        draft, draft_state = spec.drafter.draft(params, state.draft, root, state.length, active)
        tree = structure.truncate(draft.tree, state.budget)
    with jax.named_scope("verify"):
        logits, taps, block = _verify(spec, params, tree, state.cache, state.length, active)
    with jax.named_scope("accept"):
        verdict = verify.accept(tree, logits, state.sampling, state.length, active, spec.drafter.max_depth)
    with jax.named_scope("commit"):
        cache = kv.commit(state.cache, block, verdict.path, state.length)
        before = state.replace(cache=cache)
        after, count = _append(before, verdict.tokens, verdict.count, state.length + 1)
        # The cache now holds the old root and the accepted tokens; the last emitted one is the new root.
        after = after.replace(length=state.length + count)
        statistics = _count(state.statistics, tree, verdict, count, draft.forwards)
    with jax.named_scope("observe"):
        draft_state = spec.drafter.observe(params, draft_state, tree, verdict, taps, logits)
    return after.replace(draft=draft_state, statistics=statistics)


def run(spec: DecodeSpec, params: Params, state: DecodeState, max_rounds: Int[Array, ""]) -> DecodeState:
    """Rounds until every row is done, at most `max_rounds` (traced)."""

    def more(carry):
        i, state = carry
        return (i < max_rounds) & state.active.any()

    def step(carry):
        i, state = carry
        return i + 1, decode_step(spec, params, state)

    return jax.lax.while_loop(more, step, (jnp.int32(0), state))[1]


def _verify(spec: DecodeSpec, params: Params, tree: DraftTree, cache, length, active):
    """The target at every node, over the smallest row bucket that holds all active trees."""
    N = tree.capacity

    def rows(T: int):
        part = jax.tree.map(lambda x: x[:, :T], tree)
        return jax.tree.map(
            lambda x: jnp.pad(x, [(0, 0), (0, N - T)] + [(0, 0)] * (x.ndim - 2)),
            _target(spec, params, part, cache, length),
        )

    if len(spec.buckets) == 1:
        return rows(N)
    used = jnp.where(tree.valid & active[:, None], jnp.arange(N)[None, :] + 1, 1).max()
    index = jnp.searchsorted(jnp.array(spec.buckets), used)
    return jax.lax.switch(index, [lambda T=T: rows(T) for T in spec.buckets])


def _target(spec: DecodeSpec, params: Params, tree: DraftTree, cache, length):
    """Logits, taps and the block of new keys and values at every node of a tree."""
    out = transformer.forward(
        spec.model, params.target, tree.tokens, length[:, None] + tree.depth,
        structure.ancestor_mask(tree.parents, spec.drafter.max_depth), cache, length,
        spec.drafter.taps, spec.attention_block,
    )  # fmt: skip
    return transformer.logits(spec.model, params.target, out.hidden), out.taps, out.block


def _append(
    state: DecodeState, tokens: Int[Array, "B P"], count: Int[Array, "B"], at: Int[Array, "B"]
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Commits up to `count` tokens from position `at`, cut at the first stop token and at the limit.

    Returns:
        The state with tokens and stop reasons, and how many tokens each row took (0 where done).
    """
    P = tokens.shape[1]
    column = jnp.arange(P)[None, :]
    stops = (tokens[:, :, None] == state.stop_tokens[None, None, :]).any(axis=2)
    stops &= column < count[:, None]
    until_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, P + 1)
    room = state.limit - at
    taken = jnp.minimum(jnp.minimum(count, until_stop), room)
    taken = jnp.where(state.active, taken, 0)
    reason = jnp.where(taken >= room, StopReason.LENGTH, StopReason.RUNNING)
    reason = jnp.where(taken == until_stop, StopReason.STOP, reason)
    reason = jnp.where(state.active, reason, state.reason).astype(jnp.int32)

    offset = jnp.arange(state.tokens.shape[1])[None, :] - at[:, None]
    new = jnp.take_along_axis(tokens, jnp.clip(offset, 0, P - 1), axis=1)
    here = (offset >= 0) & (offset < taken[:, None])
    return state.replace(tokens=jnp.where(here, new, state.tokens), reason=reason), taken.astype(jnp.int32)


def _count(old: Statistics, tree: DraftTree, verdict, count, forwards) -> Statistics:
    """Adds a round; accepted nodes that a stop or the limit cut off are not counted."""
    active = verdict.active.astype(jnp.int32)
    P = verdict.path.shape[1]
    accepted = jnp.minimum(verdict.num_accepted, count)
    column = jnp.arange(P)[None, :]
    on_path = (column >= 1) & (column <= accepted[:, None]) & verdict.active[:, None]
    source = jnp.take_along_axis(tree.source, verdict.path, axis=1)
    drafted = tree.valid & (jnp.arange(tree.capacity)[None, :] > 0) & verdict.active[:, None]

    def tally(labels: Array, mask: Array, size: int) -> Array:
        return ((labels[:, :, None] == jnp.arange(size)[None, None, :]) & mask[:, :, None]).sum(axis=1, dtype=jnp.int32)

    return Statistics(
        rounds=old.rounds + active,
        emitted=old.emitted + count,
        forwards=old.forwards + forwards * active,
        drafted_by_source=old.drafted_by_source + tally(tree.source, drafted, NUM_SOURCES),
        accepted_by_source=old.accepted_by_source + tally(source, on_path, NUM_SOURCES),
        drafted_by_depth=old.drafted_by_depth + tally(tree.depth, drafted, P),
        accepted_by_depth=old.accepted_by_depth + on_path.astype(jnp.int32),
        histogram=old.histogram + (accepted[:, None] == column).astype(jnp.int32) * active[:, None],
    )
