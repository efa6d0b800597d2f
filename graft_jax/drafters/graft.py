"""Graft: a combinator that fills the slots a drafter leaves with retrieved tokens.

Over `Empty` it is Token Recycling; over a pruned EAGLE-3 tree it is Graft (arXiv 2605.20104). It knows
neither: a base hands over a tree in order of priority and the stage in which its drafting ended.
"""

import dataclasses
from typing import Literal

import flax.struct
import jax.numpy as jnp
import numpy as np

from graft_jax.drafters.base import Draft, Drafter
from graft_jax.retrieval import fill
from graft_jax.retrieval.adjacency import EMPTY, Level, SuccessorTable
from graft_jax.tree import hybrid
from graft_jax.tree.structure import DraftTree
from graft_jax.tree.templates import Template
from graft_jax.types import Array, Int
from graft_jax.verify import Verdict


@dataclasses.dataclass(frozen=True)
class Stage:
    """How the budget is split when the base's drafting ended here.

    Attributes:
        keep: base nodes that are kept whatever is retrieved.
        template: retrieved nodes that come next.
    """

    keep: int
    template: Template


class GraftState(flax.struct.PyTreeNode):
    """The base's state, the successor table, and the tokens before the root, oldest first."""

    base: object
    table: tuple[Level, ...]
    history: Int[Array, "B h"]


@dataclasses.dataclass(frozen=True)
class Graft:
    """Fills a base draft with nodes retrieved from what the target said before.

    Slots go, in this order, to the stage's kept base nodes, the stage's template, the rest of the full
    template, and the rest of the base's nodes, until the budget is spent.

    Attributes:
        base: any drafter.
        table: the successor table's settings.
        stages: indexed by the base's `Draft.stage`.
        full: the envelope of all stage templates.
        budget: K, nodes beside the root.
        attach: where retrieved nodes hang: "root"; "tail", the deepest kept node of the best kept chain;
            or "ends", every leaf of the kept tree.
    """

    base: Drafter
    table: SuccessorTable
    stages: tuple[Stage, ...]
    full: Template
    budget: int
    attach: Literal["root", "tail", "ends"] = "root"

    def __post_init__(self):
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 node")
        if self.attach not in ("root", "tail", "ends"):
            raise ValueError(f"attach={self.attach!r} must be 'root', 'tail' or 'ends'")
        if not self.stages:
            raise ValueError("Graft needs at least one stage")
        for i, stage in enumerate(self.stages):
            if not 0 <= stage.keep <= self.budget:
                raise ValueError(f"stage {i}: keep={stage.keep} must be between 0 and {self.budget=}")
            if not set(stage.template.paths) <= set(self.full.paths):
                raise ValueError(f"stage {i}: its template is not part of the full template")
        if self.full.width > self.table.width:
            raise ValueError(f"the template needs rows of {self.full.width}; {self.table.width=}")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.base.taps

    @property
    def wants_logits(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        return self.budget

    @property
    def max_depth(self) -> int:
        deepest = self.full.max_depth
        return max(self.base.max_depth, deepest if self.attach == "root" else self.base.max_depth + deepest)

    def init(self, params, batch, cache_size, memory):
        base_memory, table = (None, None) if memory is None else memory
        return GraftState(
            base=self.base.init(params, batch, cache_size, base_memory),
            table=self.table.init() if table is None else table,
            history=jnp.full((batch, self.table.order - 1), EMPTY, jnp.int32),
        )

    def memory(self, state):
        return self.base.memory(state.base), state.table

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        assert logits is not None
        context = fill.sequence_contexts(tokens, state.history)
        successors, probabilities = self.table.choose(logits)
        n = tokens.size
        table = self.table.update_summed(
            state.table, context.reshape(n, -1), successors.reshape(n, -1),
            probabilities.reshape(n, -1), valid.reshape(n),
        )  # fmt: skip
        return GraftState(
            base=self.base.prefill(params, state.base, tokens, next_tokens, positions, valid, taps, logits),
            table=table,
            history=fill.advance(state.history, tokens, valid.sum(axis=1)),
        )

    def draft(self, params, state, root, length, active):
        base, base_state = self.base.draft(params, state.base, root, length, active)
        return self.build(state, base), state.replace(base=base_state)

    def build(self, state: GraftState, base: Draft) -> Draft:
        """The base's draft with its freed slots filled."""
        B = base.tree.batch
        keep = jnp.array([stage.keep for stage in self.stages])[base.stage]
        points, point_valid = self._points(base.tree, keep)
        A = points.shape[1]

        contexts = fill.node_contexts(base.tree, state.history)
        contexts = jnp.take_along_axis(contexts, points[:, :, None], axis=1)
        tokens, valid = fill.fill_template(self.full, self.table, state.table, contexts.reshape(B * A, -1))
        tree = hybrid.merge(
            base.tree, fill.node_paths(base.tree, self.base.max_depth), self.full, points, point_valid,
            tokens.reshape(B, A, -1), valid.reshape(B, A, -1),
            jnp.asarray(self._priorities(base.tree.capacity, A))[base.stage], self.budget,
        )  # fmt: skip
        return base.replace(tree=tree)

    def observe(self, params, state, tree, verdict, taps, logits):
        line = jnp.concatenate([tree.tokens[:, :1], verdict.tokens], axis=1)
        count = jnp.where(verdict.active, verdict.num_accepted + 1, 0)
        return GraftState(
            base=self.base.observe(params, state.base, tree, verdict, taps, logits),
            table=self.learn(state, tree, verdict, logits),
            history=fill.advance(state.history, line, count),
        )

    def learn(self, state: GraftState, tree: DraftTree, verdict: Verdict, logits: Array) -> tuple[Level, ...]:
        """The table with what the target said at every node."""
        contexts = fill.node_contexts(tree, state.history)
        successors, _ = self.table.choose(logits)
        n = tree.tokens.size
        B, N = tree.tokens.shape
        # Node i was accepted if the path holds it (unused path entries are 0, the root, which is too).
        accepted = (verdict.path[:, :, None] == jnp.arange(N)[None, None, :]).any(axis=1)
        return self.table.update(
            state.table, contexts.reshape(n, -1), successors.reshape(n, -1),
            (tree.valid & verdict.active[:, None]).reshape(n), accepted.reshape(n),
        )  # fmt: skip

    def _points(self, tree, keep: Int[Array, "B"]):
        """Where the template hangs: [B, A] node indices and which of them count."""
        B, N = tree.tokens.shape
        zero = jnp.zeros((B, 1), jnp.int32)
        if self.attach == "root":
            return zero, zero == 0
        kept = tree.valid & (jnp.arange(N)[None, :] <= keep[:, None])
        if self.attach == "tail":
            # Among the deepest kept nodes the first has the highest priority.
            return jnp.argmax(jnp.where(kept, tree.depth, -1), axis=1)[:, None].astype(jnp.int32), zero == 0
        nodes = jnp.arange(N)
        has_child = (kept[:, :, None] & (tree.parents[:, :, None] == nodes[None, None, :])).any(axis=1)
        return nodes[None, :] + zero, kept & ~has_child

    def _priorities(self, base_nodes: int, copies: int) -> np.ndarray:
        """[stages, Nb + A * n]: the order in which candidates get slots; the root is first."""
        n = len(self.full)
        table = np.zeros((len(self.stages), base_nodes + copies * n), np.int32)
        for s, stage in enumerate(self.stages):
            first = {path: i for i, path in enumerate(stage.template.extended(self.full).paths)}
            block = [first[path] for path in self.full.paths]  # this stage's rank of each template node
            kept = min(stage.keep, base_nodes - 1)
            base = list(range(kept + 1)) + [kept + 1 + copies * n + j for j in range(base_nodes - 1 - kept)]
            retrieved = [kept + 1 + rank * copies + a for a in range(copies) for rank in block]
            table[s] = base + retrieved
        return table
