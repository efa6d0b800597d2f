"""What a generation gives back."""

import dataclasses
from typing import Any

import numpy as np

from graft_jax.decode import Statistics
from graft_jax.tree.structure import DRAFTED, RETRIEVED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Numbers of one row.

    Attributes:
        new_tokens: tokens generated.
        rounds: target passes after the prompt's.
        mean_acceptance_length: tokens a round, the bonus included; tokens after a stop are not counted.
        acceptance_histogram: entry n counts rounds in which n drafted tokens were accepted.
        drafted, accepted: tree nodes by source ("drafted" by a model, "retrieved" from the table).
        drafted_by_depth, accepted_by_depth: the same by depth, from depth 1.
        draft_forwards: drafter passes.
        prefill_seconds: the prompt's passes, compiling not counted.
        first_token_seconds: the prompt's passes and the first round.
        decode_seconds: all rounds of the batch, compiling not counted.
        tokens_per_second: new tokens a decode second.
        compile_seconds: what compiling cost this call; 0 when everything was there.
        policy: which drafting policy was used.
    """

    new_tokens: int
    rounds: int
    mean_acceptance_length: float
    acceptance_histogram: list[int]
    drafted: dict[str, int]
    accepted: dict[str, int]
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    draft_forwards: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    tokens_per_second: float
    compile_seconds: float
    policy: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One finished row.

    Attributes:
        prompt_tokens: length of the prompt in tokens.
        token_ids: new tokens, the stop token included.
        text: their text without special tokens; "" without a tokenizer.
        finish_reason: "stop", "length" or "interrupted".
    """

    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a stream. `result` is there on the last one only."""

    text: str
    token_ids: list[int]
    result: Generation | None = None


def row_stats(
    statistics: Statistics, row: int, *, new_tokens: int, policy: dict[str, Any], seconds: dict[str, float]
) -> Stats:
    """Picks one row out of the state's statistics (as NumPy arrays); `seconds` are the fields of that name."""

    def pick(name: str) -> np.ndarray:
        return np.asarray(getattr(statistics, name))[row]

    rounds, emitted = int(pick("rounds")), int(pick("emitted"))
    drafted, accepted = pick("drafted_by_source"), pick("accepted_by_source")
    names = {"drafted": DRAFTED, "retrieved": RETRIEVED}
    return Stats(
        new_tokens=new_tokens,
        rounds=rounds,
        mean_acceptance_length=emitted / rounds if rounds else 0.0,
        acceptance_histogram=pick("histogram").tolist(),
        drafted={name: int(drafted[source]) for name, source in names.items()},
        accepted={name: int(accepted[source]) for name, source in names.items()},
        drafted_by_depth=pick("drafted_by_depth")[1:].tolist(),
        accepted_by_depth=pick("accepted_by_depth")[1:].tolist(),
        draft_forwards=int(pick("forwards")),
        **seconds,
        tokens_per_second=emitted / seconds["decode_seconds"] if seconds["decode_seconds"] > 0 else 0.0,
        policy=policy,
    )
