"""The EAGLE-3 drafter: a small head on target features drafts a dynamic tree (arXiv 2503.01840)."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from graft_jax.models import eagle3
from graft_jax.models.eagle3_config import Eagle3Config
from graft_jax.models.layers import attend
from graft_jax.tree import beam as beams
from graft_jax.tree.beam import Beam, Lanes
from graft_jax.tree.gates import Gates
from graft_jax.types import Array, Float, Int
from pallas_kernels import dispatch, topk_rows


class Eagle3State(flax.struct.PyTreeNode):
    """Between rounds: the head's keys and values of committed positions, all made from true features.

    Attributes:
        output: what the head said at the last committed position; the next tree starts from it.
        length: committed positions, those before the root.
    """

    keys: Float[Array, "B K E S"]
    values: Float[Array, "B K S E"]
    output: Float[Array, "B M"]
    length: Int[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Eagle3:
    """Drafts with an EAGLE-3 head.

    Position i of the head holds the target's features there and the token at i + 1, so when a round is
    verified, its accepted tokens bring the head up to the new root in one pass (`observe`), whose last row
    already says the tree's first level. The keys and values made while drafting are dropped.

    Attributes:
        config: of the head.
        beam: sizes of the tree.
        gates: where drafting may end early; thresholds are `Params.thresholds`.
        keep: nodes that stay when it ended at each gate; () keeps all that were drafted.
        attention_block: see `layers.attend`.
        cache_dtype: of the keys and values.
        kernels: as in `SuccessorTable`.
    """

    config: Eagle3Config
    beam: Beam
    gates: Gates = Gates()
    keep: tuple[int, ...] = ()
    attention_block: int = 0
    cache_dtype: str = "float32"
    kernels: str | None = None

    def __post_init__(self):
        if self.beam.top_k > self.config.draft_vocab_size:
            raise ValueError(f"top_k={self.beam.top_k} is above draft_vocab_size={self.config.draft_vocab_size}")
        if self.gates.depths and self.gates.depths[-1] > self.beam.depth:
            raise ValueError(f"gate depths {self.gates.depths} lie below the tree's depth={self.beam.depth}")
        if self.keep and len(self.keep) != len(self.gates.depths):
            raise ValueError(f"keep={self.keep} must name one number a gate ({len(self.gates.depths)})")
        dispatch.check(self.kernels)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def wants_logits(self) -> bool:
        return False

    @property
    def capacity(self) -> int:
        return self.beam.total

    @property
    def max_depth(self) -> int:
        return self.beam.max_depth

    def init(self, params, batch, cache_size, memory):
        K, E = self.config.num_kv_heads, self.config.head_dim
        return Eagle3State(
            keys=jnp.zeros((batch, K, E, cache_size), self.cache_dtype),
            values=jnp.zeros((batch, K, cache_size, E), self.cache_dtype),
            output=jnp.zeros((batch, self.config.hidden_size), jnp.float32),
            length=jnp.zeros(batch, jnp.int32),
        )

    def memory(self, state):
        return None

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        return self._extend(params, state, next_tokens, taps, valid.sum(axis=1, dtype=jnp.int32))

    def observe(self, params, state, tree, verdict, taps, logits):
        accepted = tuple(jnp.take_along_axis(tap, verdict.path[:, :, None], axis=1) for tap in taps)
        count = jnp.where(verdict.active, verdict.count, 0)
        return self._extend(params, state, verdict.tokens, accepted, count)

    def draft(self, params, state, root, length, active):
        # A prompt of one token has no features before its root: nothing to start from.
        active = active & (state.length > 0)
        tokens, log_probs = self._best(params, state.output[:, None, :])
        B, W, D = root.shape[0], self.beam.top_k, self.beam.depth
        rows = jnp.zeros((B, D * W, self.config.num_kv_heads, self.config.head_dim), self.cache_dtype)
        outputs = jnp.broadcast_to(state.output[:, None, :], (B, W, state.output.shape[1]))

        def expand(carry, depth, lanes: Lanes):
            keys, values, outputs = carry
            hidden = jnp.take_along_axis(outputs, lanes.came_from[:, :, None], axis=1)
            positions = jnp.broadcast_to(state.length[:, None] + depth, lanes.tokens.shape)
            made = eagle3.project(
                self.config, params.drafter, params.target.embed, lanes.tokens, hidden, positions
            )  # fmt: skip
            keys = jax.lax.dynamic_update_slice_in_dim(keys, made.key.astype(keys.dtype), depth * W, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, made.value.astype(values.dtype), depth * W, axis=1)
            attended = attend(
                made.query, state.keys, state.values, state.length, keys, values, lanes.mask, self.attention_block
            )
            outputs = eagle3.finish(self.config, params.drafter, made.residual, attended)
            return *self._best(params, outputs), (keys, values, outputs)

        thresholds = jnp.zeros(0) if params.thresholds is None else params.thresholds
        draft = beams.grow(
            self.beam, self.gates, thresholds, root, tokens[:, 0], log_probs[:, 0], expand,
            (rows, rows, outputs), active,
        )  # fmt: skip
        tree = draft.tree
        if self.keep:
            keep = jnp.array((self.beam.total, *self.keep))[draft.stage]
            tree = tree.replace(valid=tree.valid & (jnp.arange(tree.capacity)[None, :] <= keep[:, None]))
        # The pass over the accepted tokens gave the first level.
        return draft.replace(tree=tree, forwards=draft.forwards + active.astype(jnp.int32)), state

    def _extend(self, params, state: Eagle3State, tokens: Int[Array, "B T"], taps, count: Int[Array, "B"]):
        """Runs the head over the next T positions, of which the first `count` become committed."""
        B, T = tokens.shape
        column = jnp.arange(T)
        positions = state.length[:, None] + column[None, :]
        hidden = eagle3.fuse(self.config, params.drafter, taps)
        made = eagle3.project(self.config, params.drafter, params.target.embed, tokens, hidden, positions)
        key, value = made.key.astype(self.cache_dtype), made.value.astype(self.cache_dtype)
        causal = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
        attended = attend(
            made.query, state.keys, state.values, state.length, key, value, causal, self.attention_block
        )  # fmt: skip
        outputs = eagle3.finish(self.config, params.drafter, made.residual, attended)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        output = jnp.take_along_axis(outputs, last, axis=1)[:, 0]
        return Eagle3State(
            keys=_write(state.keys, key.transpose(0, 2, 3, 1), state.length, axis=3),
            values=_write(state.values, value.transpose(0, 2, 1, 3), state.length, axis=2),
            output=jnp.where((count > 0)[:, None], output, state.output),
            length=state.length + count,
        )

    def _best(self, params, outputs: Float[Array, "B T M"]) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
        """The top k successors after each output, as target ids, and their log-probabilities."""
        logits = eagle3.logits(self.config, params.drafter, outputs)
        values, ids = topk_rows(logits, self.beam.top_k, implementation=self.kernels)
        log_probs = values - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        table = params.drafter.draft_to_target
        return ids if table is None else table[ids], log_probs


def _write(old: Array, new: Array, at: Int[Array, "B"], axis: int) -> Array:
    """Puts the new entries of each batch row at `at`; what lies behind a row's length is never read."""
    for b in range(old.shape[0]):  # separate slices stay in place; a batched one is a scatter
        start = [b] + [at[b] if i == axis else 0 for i in range(1, 4)]
        old = jax.lax.dynamic_update_slice(old, new[b : b + 1], start)
    return old
