"""`method="auto"`: the way to draft that gives the most tokens a second on this machine.

Acceptance belongs to the target and its drafters and is recorded with them (`kit`); what a round costs belongs to
the machine and is measured here, once, and kept.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft_jax import methods, provenance, user_cache
from graft_jax.kit import Candidate, Record

if TYPE_CHECKING:
    from graft_jax.engine import SpeculativeDecoder

TIMED_RUNS, TIMED_TOKENS = 5, 32
PLAIN = Candidate("ar", {"budget": 0}, 1.0)


class RoundSeconds:
    """Seconds of a round by candidate, kept in a file from one process to the next.

    Args:
        path: a file that need not exist; what is broken in it is measured again.
        measure: times a candidate that the file does not hold.
    """

    def __init__(self, path: Path, measure: Callable[[Candidate], float]):
        self._path, self._measure = path, measure
        try:
            self._known = {str(name): float(value) for name, value in json.loads(path.read_bytes()).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            self._known = {}

    def __call__(self, candidate: Candidate) -> float:
        if candidate.name not in self._known:
            self._known[candidate.name] = self._measure(candidate)
            user_cache.replace(self._path, json.dumps(self._known, indent=1).encode())
        return self._known[candidate.name]


def choose(candidates: Sequence[Candidate], seconds: Callable[[Candidate], float]) -> Candidate:
    """The candidate with the most tokens a second, plain decoding among them.

    Timing one compiles it, so those that cannot win are left out: retrieval drafts at next to no cost, hence a
    round of another method is no faster than retrieval's with as many nodes or fewer.
    """
    best, top = PLAIN, 1.0 / seconds(PLAIN)
    least: dict[int, float] = {}  # nodes -> seconds
    for candidate in sorted(candidates, key=lambda c: (bool(methods.get(c.method).heads), -c.acceptance)):
        bound = max((value for nodes, value in least.items() if nodes <= candidate.budget), default=0.0)
        if candidate.acceptance <= top * bound:
            continue
        taken = seconds(candidate)
        if not methods.get(candidate.method).heads:
            least[candidate.budget] = taken
        if candidate.acceptance / taken > top:
            best, top = candidate, candidate.acceptance / taken
    return best


def pick(
    plain: "SpeculativeDecoder",
    record: Record,
    load_head: Callable[[Sequence[str]], tuple[Any, Any]],
    options: Mapping[str, Any],
    on_status: Callable[[str], None],
) -> "SpeculativeDecoder":
    """The decoder of the best candidate.

    Args:
        plain: plain decoding of the target, with the kit's table.
        load_head: configuration and weights of the kit's head of one of these kinds.
        options: for all candidates, beside their own.
        on_status: is told what is being measured.
    """
    made: dict[str, SpeculativeDecoder] = {}
    loaded: dict[tuple[str, ...], tuple[Any, Any]] = {}

    def build(candidate: Candidate) -> "SpeculativeDecoder":
        kinds, settings = methods.get(candidate.method).heads, {**candidate.options, **options}
        if candidate == PLAIN:
            return plain
        if not kinds:
            return plain.with_method(candidate.method, **settings)
        if kinds not in loaded:
            loaded[kinds] = load_head(kinds)
        return plain.with_drafter(candidate.method, *loaded[kinds], **settings)

    def measure(candidate: Candidate) -> float:
        on_status(f"timing {candidate.name} (kept for the next time)")
        made[candidate.name] = build(candidate)
        return round_seconds(made[candidate.name], record.prompt)

    facts = [record.digest, provenance.of(plain), plain.spec.max_length, sorted(options.items())]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    best = choose(record.candidates, RoundSeconds(user_cache.folder() / f"rounds-{name}.json", measure))
    return made.get(best.name) or build(best)


def round_seconds(decoder: "SpeculativeDecoder", prompt: list[int]) -> float:
    """Seconds of a round, the least of several runs, for other load only ever adds; the decoder forgets them."""
    times = []
    for run in range(TIMED_RUNS + 1):
        decoder.reset_memory()
        stats = decoder.generate(prompt, max_new_tokens=TIMED_TOKENS, ignore_eos=True).stats
        if run:
            times.append(stats.decode_seconds / stats.rounds)
    decoder.reset_memory()
    return min(times)
