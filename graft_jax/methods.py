"""The methods: names for compositions of drafters. Adding a system means adding a line here."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any, Literal

from graft_jax.config import ModelConfig
from graft_jax.drafters.base import Drafter
from graft_jax.drafters.dflash import Chain, DFlash, Marginal, Policy
from graft_jax.drafters.domino import Corrected
from graft_jax.drafters.eagle3 import Eagle3
from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, Stage
from graft_jax.drafters.lookup import Lookup
from graft_jax.models.dflash_config import DFlashConfig
from graft_jax.retrieval.adjacency import Level, SuccessorTable
from graft_jax.tree import gates, templates
from graft_jax.tree.beam import Beam
from graft_jax.tree.gates import Gates
from graft_jax.tree.templates import Template
from pallas_kernels import IMPLEMENTATIONS

SMALL_BUDGET, LARGE_BUDGET, BLOCK_BUDGET = 7, 60, 16  # tree nodes that pay on a CPU; Graft's; DominoTree's
CANDIDATES = 64  # M, as in DominoTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that methods are built from; each takes those it knows. None takes the method's default.

    Attributes:
        budget: K, tree nodes beside the root.
        table_order: longest context of the successor table, in tokens; 1 is the papers' table.
        kernels: implementation of the kernels, one of `pallas_kernels.IMPLEMENTATIONS`; None: the platform's own.
        template: "narrow", "graft" (Graft's nested stage templates) or "recycling" (Token Recycling's tree).
        prompt_lookup_max, prompt_lookup_min: lengths of the n-grams that `lookup` tries.
        draft_depth, draft_top_k: expansions and beam of EAGLE's tree (`tree.beam.Beam`).
        gates: checkpoints where drafting may stop; () has none.
        gate_measure: of confidence at a checkpoint (`tree.gates.Gates`).
        thresholds: one a gate.
        prune: False drafts to the end and splits the budget as at the last gate (Graft's "w/o prune").
        retrieval: False leaves the slots that pruning freed empty (Graft's "w/o retrieval").
        attach: where retrieved nodes hang (`drafters.graft.Graft`).
        block_size: slots of a block that are used; the drafter's own at most.
        candidates: M, tokens a slot whose logits Domino's head corrects; 0 corrects all.
        scoring: of DominoTree's nodes: "path", "greedy-path" or "marginal" (`drafters.domino`).
        normaliser: of corrected probabilities: "slice" sums over the candidates, "full" over the vocabulary.
    """

    budget: int | None = None
    table_order: int = 3
    kernels: str | None = None
    template: str | None = None
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    draft_depth: int | None = None
    draft_top_k: int | None = None
    gates: tuple[int, ...] | None = None
    gate_measure: Literal["best", "beam"] = "best"
    thresholds: tuple[float, ...] | None = None
    prune: bool = True
    retrieval: bool = True
    attach: Literal["root", "tail", "ends"] | None = None
    block_size: int | None = None
    candidates: int | None = None
    scoring: Literal["marginal", "greedy-path", "path"] | None = None
    normaliser: Literal["slice", "full"] = "slice"

    def __post_init__(self):
        if self.budget is not None and not 1 <= self.budget <= 255:
            raise ValueError(f"budget={self.budget} must be between 1 and 255 nodes")
        if self.template is not None and self.template not in templates.NAMED:
            raise ValueError(f"template={self.template!r} must be one of {sorted(templates.NAMED)}")
        if self.kernels not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"kernels={self.kernels!r} must be one of {IMPLEMENTATIONS}, or None")
        if self.draft_depth is not None and not 0 <= self.draft_depth <= 32:
            raise ValueError(f"draft_depth={self.draft_depth} must be between 0 and 32 expansions")
        if self.draft_top_k is not None and not 1 <= self.draft_top_k <= 64:
            raise ValueError(f"draft_top_k={self.draft_top_k} must be between 1 and 64")
        if self.gate_measure not in ("best", "beam"):
            raise ValueError(f"gate_measure={self.gate_measure!r} must be 'best' or 'beam'")
        if not self.prune and not self.retrieval:
            raise ValueError("prune=False with retrieval=False is method 'eagle3'")
        for value in self.thresholds or ():
            if not -1 <= value <= 64:
                raise ValueError(f"thresholds={self.thresholds} must be probabilities (-1 never closes a gate)")
        if self.block_size is not None and self.block_size < 2:
            raise ValueError(f"block_size={self.block_size} must be at least 2 slots")
        if self.candidates is not None and self.candidates < 0:
            raise ValueError(f"candidates={self.candidates} must be at least 0 (0 takes the whole vocabulary)")
        if self.scoring not in (None, "marginal", "greedy-path", "path"):
            raise ValueError(f"scoring={self.scoring!r} must be 'marginal', 'greedy-path' or 'path'")
        if self.normaliser not in ("slice", "full"):
            raise ValueError(f"normaliser={self.normaliser!r} must be 'slice' or 'full'")


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(Options))


@dataclasses.dataclass(frozen=True)
class Context:
    """What a method is built for.

    Attributes:
        model: the target.
        drafter: the loaded head's configuration, if the method needs a head.
        small: verified rows are dear (a CPU): small trees.
        attention_block, cache_dtype: as in `decode.DecodeSpec`.
        table: a successor table that was filled beforehand, settings and levels; methods that retrieve start with
            it.
    """

    model: ModelConfig
    drafter: Any = None
    small: bool = True
    attention_block: int = 0
    cache_dtype: str = "float32"
    table: tuple[SuccessorTable, tuple[Level, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class Built:
    """A drafter, the thresholds of its gates, and the memory that it starts with."""

    drafter: Drafter
    thresholds: tuple[float, ...] = ()
    memory: Any = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        summary: one line for people.
        needs: what it needs beside the target.
        paper: where it comes from.
        build: makes the drafter.
        heads: kinds of draft head (see `io.block_drafter.KINDS`), of which it needs one; () needs none.
        row_buckets: tree rows worth compiling apart (see `DecodeSpec.row_buckets`).
    """

    summary: str
    needs: str
    paper: str
    build: Callable[[Context, Options], Built]
    heads: tuple[str, ...] = ()
    row_buckets: tuple[int, ...] = (4, 8, 16, 32)

    def buckets(self, context: Context) -> tuple[int, ...]:
        """Row buckets where rows are dear. An accelerator reads the weights for one row as for a hundred."""
        return self.row_buckets if context.small else ()


def _recycling(context: Context, options: Options) -> Built:
    name = options.template or "narrow"
    full = templates.NAMED[name]
    budget = options.budget or (SMALL_BUDGET if name == "narrow" else len(full))
    if budget > len(full):
        raise ValueError(f"budget={budget}: the {name!r} template has {len(full)} nodes")
    full = full.prefix(budget)
    return Built(Graft(Empty(), _table(context, options), (Stage(0, full),), full, budget), memory=_memory(context))


def _lookup(context: Context, options: Options) -> Built:
    return Built(Lookup(options.budget or SMALL_BUDGET, options.prompt_lookup_max, options.prompt_lookup_min))


def _eagle3(context: Context, options: Options) -> Built:
    """The dynamic tree; with `gates` also ECHO's and DDD's early stops."""
    beam = _beam(context, options)
    return _gated(context, options, beam, Gates(options.gates or (), options.gate_measure))


def _graft(context: Context, options: Options) -> Built:
    beam = _beam(context, options)
    depths = gates.scaled(beam.depth) if options.gates is None else options.gates
    K = beam.total
    kept = tuple(gates.kept_nodes(depth, K, beam.depth) for depth in depths)
    found = Gates(depths, options.gate_measure)
    if not options.retrieval:
        return _gated(context, options, beam, found, kept)
    name = options.template or ("narrow" if context.small else "graft")
    full = templates.NAMED[name].prefix(K)
    if options.prune:
        base = _gated(context, options, beam, found)
        stages = (Stage(K, Template(())), *(Stage(keep, full.prefix(K - keep)) for keep in kept))
    else:
        base = _gated(context, options, beam, Gates())
        keep = kept[-1] if kept else K
        stages = (Stage(keep, full.prefix(K - keep)),)
    drafter = Graft(base.drafter, _table(context, options), stages, full, K, options.attach or "root")
    return Built(drafter, base.thresholds, _memory(context))


def _beam(context: Context, options: Options) -> Beam:
    """The papers' sizes, or small ones where rows are dear."""
    depth, top_k = (5, 4) if context.small else (8, 10)
    depth = depth if options.draft_depth is None else options.draft_depth
    return Beam(
        depth, options.draft_top_k or top_k, options.budget or (SMALL_BUDGET if context.small else LARGE_BUDGET)
    )


def beam_of(drafter: Drafter) -> Beam:
    """The sizes of a drafter's dynamic tree, whatever is wrapped around it."""
    return drafter.beam if isinstance(drafter, Eagle3) else beam_of(drafter.base)  # type: ignore[attr-defined]


def _gated(context: Context, options: Options, beam: Beam, found: Gates, keep: tuple[int, ...] = ()) -> Built:
    thresholds = gates.default_thresholds(found.depths) if options.thresholds is None else options.thresholds
    if len(thresholds) != len(found.depths) and options.prune:
        raise ValueError(f"thresholds={thresholds} must name one value for each of the gates {found.depths}")
    drafter = Eagle3(
        context.drafter, beam, found, keep, context.attention_block, context.cache_dtype, options.kernels
    )  # fmt: skip
    return Built(drafter, thresholds[: len(found.depths)])


def _dflash(context: Context, options: Options) -> Built:
    return Built(_block(context, options, Chain(_chain_budget(context, options))))


def _domino(context: Context, options: Options) -> Built:
    policy = Corrected(
        _chain_budget(context, options), "chain", options.candidates or 0, normaliser=options.normaliser,
        kernels=options.kernels,
    )  # fmt: skip
    return Built(_block(context, options, policy))


def _ddtree(context: Context, options: Options) -> Built:
    if options.scoring not in (None, "marginal"):
        raise ValueError(f"scoring={options.scoring!r}: method 'ddtree' is scoring 'marginal'; use 'dominotree'")
    return Built(_block(context, options, Marginal(_block_budget(context, options), kernels=options.kernels)))


def _dominotree(context: Context, options: Options) -> Built:
    return Built(_block(context, options, _domino_policy(context, options)))


def _graft_dflash(context: Context, options: Options) -> Built:
    """The confident part of the block, and a retrieved chain behind it."""
    K = _block_budget(context, options)
    likely = min(K, _block_config(context, options).num_drafted)
    return _grafted(context, options, Chain(likely), K, templates.chain(K), "tail", 0.3)


def _graft_dominotree(context: Context, options: Options) -> Built:
    """Likely nodes of the tree, and retrieved ones at the root instead of the others."""
    policy = _domino_policy(context, options)
    name = options.template or ("narrow" if context.small else "graft")
    full = templates.NAMED[name].prefix(policy.budget)
    return _grafted(context, options, policy, policy.budget, full, "root", 0.1)


def _grafted(
    context: Context, options: Options, policy: Policy, K: int, full: Template, attach: Literal["root", "tail"],
    threshold: float,
) -> Built:  # fmt: skip
    """A block drafter whose unlikely nodes make room for retrieved ones."""
    thresholds = (threshold,) if options.thresholds is None else options.thresholds
    if len(thresholds) != 1:
        raise ValueError(f"thresholds={thresholds} must be one value: the probability that a kept path needs")
    if not options.retrieval:
        return Built(_block(context, options, policy, "drop"), thresholds)
    stages = tuple(Stage(keep, full.prefix(K - keep)) for keep in range(policy.budget + 1))
    base = _block(context, options, policy, "mark")
    drafter = Graft(base, _table(context, options), stages, full, K, options.attach or attach)
    return Built(drafter, thresholds, _memory(context))


def _domino_policy(context: Context, options: Options) -> Marginal | Corrected:
    budget, tree = _block_budget(context, options), options.scoring or "path"
    if tree == "marginal":
        return Marginal(budget, kernels=options.kernels)
    candidates = CANDIDATES if options.candidates is None else options.candidates
    return Corrected(budget, tree, candidates, normaliser=options.normaliser, kernels=options.kernels)


def _block(
    context: Context, options: Options, policy: Policy, unlikely: Literal["keep", "mark", "drop"] = "keep"
) -> DFlash:
    config = _block_config(context, options)
    return DFlash(config, context.model, policy, unlikely, context.attention_block, context.cache_dtype)


def _block_config(context: Context, options: Options) -> DFlashConfig:
    config, size = context.drafter, options.block_size
    if size is None:
        return config
    if size > config.block_size:
        raise ValueError(f"block_size={size} is above the drafter's {config.block_size} slots")
    return dataclasses.replace(config, block_size=size)


def _block_budget(context: Context, options: Options) -> int:
    return options.budget or (SMALL_BUDGET if context.small else BLOCK_BUDGET)


def _chain_budget(context: Context, options: Options) -> int:
    drafted = _block_config(context, options).num_drafted
    if options.budget is not None and options.budget > drafted:
        raise ValueError(f"budget={options.budget}: the drafter's block says {drafted} tokens")
    return min(_block_budget(context, options), drafted)


def _table(context: Context, options: Options) -> SuccessorTable:
    if context.table is not None:
        return dataclasses.replace(context.table[0], kernels=options.kernels)
    return SuccessorTable(context.model.vocab_size, order=options.table_order, kernels=options.kernels)


def _memory(context: Context) -> Any:
    """Graft's memory with a table that was filled beforehand."""
    return None if context.table is None else (None, context.table[1])


METHODS: dict[str, Method] = {
    "ar": Method(
        "plain decoding, one token a pass", "nothing", "baseline", lambda context, options: Built(Empty()), (), ()
    ),
    "lookup": Method(
        "what followed the same words earlier in the text",
        "nothing",
        "prompt lookup decoding (transformers, vLLM)",
        _lookup,
    ),
    "recycling": Method(
        "tokens retrieved from what the target said before",
        "nothing",
        "Token Recycling, arXiv 2408.08696; Graft's table with longer contexts",
        _recycling,
    ),
    "eagle3": Method(
        "a dynamic tree from a small head on the target's features",
        "an EAGLE-3 head",
        "EAGLE-3, arXiv 2503.01840; gates of ECHO and DDD",
        _eagle3,
        heads=("eagle3",),
    ),
    "graft": Method(
        "EAGLE-3 pruned by confidence, freed slots filled with retrieved tokens",
        "an EAGLE-3 head",
        "Graft, arXiv 2605.20104",
        _graft,
        heads=("eagle3",),
    ),
    "dflash": Method(
        "a whole block in one pass of a small head on the target's features",
        "a DFlash or Domino drafter",
        "DFlash (z-lab)",
        _dflash,
        heads=("dflash", "domino"),
    ),
    "domino": Method(
        "DFlash's block, each token corrected by those before it",
        "a Domino drafter",
        "Domino (Huang et al.)",
        _domino,
        heads=("domino",),
    ),
    "ddtree": Method(
        "the most probable paths of DFlash's block as a tree",
        "a DFlash or Domino drafter",
        "DDTree, arXiv 2604.12989",
        _ddtree,
        heads=("dflash", "domino"),
    ),
    "dominotree": Method(
        "the most probable paths of Domino's block as a tree",
        "a Domino drafter",
        "DominoTree",
        _dominotree,
        heads=("domino",),
    ),
    "graft-dflash": Method(
        "the confident part of DFlash's block, then a retrieved chain",
        "a DFlash or Domino drafter",
        "Graft over DFlash",
        _graft_dflash,
        heads=("dflash", "domino"),
    ),
    "graft-dominotree": Method(
        "DominoTree's likely nodes, and retrieved ones at the root",
        "a Domino drafter",
        "Graft over DominoTree",
        _graft_dominotree,
        heads=("domino",),
    ),
}


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, 1, 0.0)
        raise ValueError(f"method={name!r} is not known; did you mean {near[0]!r}? (all: {', '.join(METHODS)})")
    return METHODS[name]
