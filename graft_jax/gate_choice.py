"""Which gates to keep, and their thresholds, from what warm-up rounds recorded (Graft, section 3.3; ECHO).

Neither paper prints its rule. Ours: a gate is worth keeping if its confidence tells the rounds whose path
goes on below the level it sees from the others (AUC); thresholds are those with the most tokens a second
over the recorded rounds, at the costs measured on this machine.
"""

import dataclasses

import numpy as np

from graft_jax.tree.gates import OPEN
from graft_jax.warmup import Record

MAX_THRESHOLDS = 64  # tried for a gate: quantiles of the recorded confidences


@dataclasses.dataclass(frozen=True)
class Choice:
    """Gates with their thresholds, and what they do to the recorded rounds.

    Attributes:
        gates: indices of the recorded gates that stay; one that closes nothing does not.
        thresholds: one for each of them.
        auc: of every recorded gate; NaN where all rounds ended alike.
        cut: share of rounds that each chosen gate ends.
        lost: accepted tokens a round that each chosen gate costs.
        speed: tokens a second with the chosen gates.
        open_speed: the same with none.
    """

    gates: tuple[int, ...]
    thresholds: tuple[float, ...]
    auc: tuple[float, ...]
    cut: tuple[float, ...]
    lost: tuple[float, ...]
    speed: float
    open_speed: float


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that a positive's score is above a negative's, ties half (Mann and Whitney); NaN without both."""
    positive, negative = scores[labels], scores[~labels]
    if not len(positive) or not len(negative):
        return float("nan")
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.sum() / (2 * len(positive) * len(negative)))


def ends(confidence: np.ndarray, gates: tuple[int, ...], thresholds: np.ndarray) -> np.ndarray:
    """[R] the column of `Record.accepted` that each round ends in: its first closed gate, or the last column."""
    closed = np.zeros(confidence.shape, bool)
    closed[:, list(gates)] = confidence[:, list(gates)] <= thresholds
    last = np.full((len(closed), 1), True)
    return np.argmax(np.concatenate([closed, last], axis=1), axis=1)


def choose(record: Record, depths: tuple[int, ...], seconds: np.ndarray, min_auc: float) -> Choice:
    """Keeps gates by AUC, then climbs, one threshold at a time, until no other value gives more tokens a second.

    Args:
        depths: of the recorded gates, rising.
        seconds: [n + 1] a round, by where it ends (see `warmup.round_seconds`).
        min_auc: below it a gate is dropped.
    """
    rows = np.arange(len(record.accepted))
    beyond = [record.accepted[:, -1] > depth + 1 for depth in depths]
    found = tuple(auc(record.confidence[:, i], labels) for i, labels in enumerate(beyond))
    kept = tuple(i for i, value in enumerate(found) if value >= min_auc)

    def speed(thresholds: np.ndarray) -> float:
        end = ends(record.confidence, kept, thresholds)
        return float((record.accepted[rows, end] + 1).sum() / seconds[end].sum())

    best = np.full(len(kept), OPEN)
    top = open_speed = speed(best)
    improved = bool(kept)
    while improved:
        improved = False
        for i, gate in enumerate(kept):
            quantiles = np.quantile(record.confidence[:, gate], np.linspace(0, 1, MAX_THRESHOLDS + 1), method="lower")
            for value in (OPEN, *np.unique(quantiles)):
                trial = best.copy()
                trial[i] = value
                if (reached := speed(trial)) > top:
                    best, top, improved = trial, reached, True
    used = [i for i in range(len(kept)) if (ends(record.confidence, kept, best) == kept[i]).any()]
    gates, thresholds = tuple(kept[i] for i in used), tuple(float(best[i]) for i in used)
    end = ends(record.confidence, gates, np.array(thresholds))
    lost = record.accepted[:, -1] - record.accepted[rows, end]
    return Choice(
        gates, thresholds, found,
        cut=tuple(float((end == gate).mean()) for gate in gates),
        lost=tuple(float(np.where(end == gate, lost, 0).mean()) for gate in gates),
        speed=top, open_speed=open_speed,
    )  # fmt: skip
