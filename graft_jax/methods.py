"""The methods: names for compositions of drafters. Adding a system means adding a line here."""

import dataclasses
import difflib
from collections.abc import Callable

from graft_jax.config import ModelConfig
from graft_jax.drafters.base import Drafter
from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, Stage
from graft_jax.drafters.lookup import Lookup
from graft_jax.retrieval.adjacency import SuccessorTable
from graft_jax.tree import templates


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that methods are built from; each takes those it knows.

    Attributes:
        budget: K, tree nodes beside the root; None takes the method's default.
        table_order: longest context of the successor table, in tokens; 1 is the papers' table.
        template: "narrow", "graft" (Graft's full envelope) or "recycling" (Token Recycling's tree).
        prompt_lookup_max, prompt_lookup_min: lengths of the n-grams that `lookup` tries.
    """

    budget: int | None = None
    table_order: int = 3
    template: str = "narrow"
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    def __post_init__(self):
        if self.budget is not None and not 1 <= self.budget <= 255:
            raise ValueError(f"budget={self.budget} must be between 1 and 255 nodes")
        if self.template not in templates.NAMED:
            raise ValueError(f"template={self.template!r} must be one of {sorted(templates.NAMED)}")


@dataclasses.dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        summary: one line for people.
        needs: what it needs beside the target.
        paper: where it comes from.
        build: makes the drafter.
        row_buckets: tree rows worth compiling apart (see `DecodeSpec.row_buckets`).
    """

    summary: str
    needs: str
    paper: str
    build: Callable[[ModelConfig, Options], Drafter]
    row_buckets: tuple[int, ...] = ()


def _recycling(config: ModelConfig, options: Options) -> Drafter:
    full = templates.NAMED[options.template]
    budget = options.budget or (7 if options.template == "narrow" else len(full))
    if budget > len(full):
        raise ValueError(f"budget={budget}: the {options.template!r} template has {len(full)} nodes")
    full = full.prefix(budget)
    table = SuccessorTable(config.vocab_size, order=options.table_order)
    return Graft(Empty(), table, (Stage(0, full),), full, budget)


def _lookup(config: ModelConfig, options: Options) -> Drafter:
    return Lookup(options.budget or 7, options.prompt_lookup_max, options.prompt_lookup_min)


METHODS: dict[str, Method] = {
    "ar": Method("plain decoding, one token a pass", "nothing", "baseline", lambda config, options: Empty()),
    "lookup": Method(
        "what followed the same words earlier in the text",
        "nothing",
        "prompt lookup decoding (transformers, vLLM)",
        _lookup,
        row_buckets=(4, 8, 16, 32),
    ),
    "recycling": Method(
        "tokens retrieved from what the target said before",
        "nothing",
        "Token Recycling, arXiv 2408.08696; Graft's table with longer contexts",
        _recycling,
        row_buckets=(4, 8, 16, 32),
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
