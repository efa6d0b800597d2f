"""Fills a retrieval table from text: what the target would say at every place of its own answers."""

from collections.abc import Callable

import jax
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models.transformer import TargetParams
from graft_jax.retrieval import stored
from graft_jax.retrieval.adjacency import Level, SuccessorTable
from graft_jax.training import features, shards
from graft_jax.training.feature_cache import FeatureSource
from graft_jax.types import Array, Float


def observe(
    config: ModelConfig,
    params: TargetParams,
    source: FeatureSource,
    table: SuccessorTable,
    batch_rows: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> stored.Observations:
    """The target's best tokens, with their probabilities, before every trained token of a data set."""
    rows: shards.Rows = source.rows

    @jax.jit
    def best(params, hidden: Float[Array, "B S M"]):
        return features.of_logits(config, params, hidden, table.choose)

    contexts, successors, weights = [], [], []
    for start in range(0, len(rows), batch_rows):
        index = np.arange(start, start + batch_rows)
        ids, shares = map(np.asarray, best(params, source.batch(np.minimum(index, len(rows) - 1).tolist()).hidden))
        for place, row in enumerate(index[index < len(rows)]):
            segments = rows.segments[row]
            said = np.append(rows.mask[row, 1:] & (segments[1:] == segments[:-1]), False)
            contexts.append(stored.contexts_of(rows.tokens[row], segments, table.order)[said])
            successors.append(ids[place][said])
            weights.append(shares[place][said])
        on_progress(min(start + batch_rows, len(rows)))
    return stored.Observations(np.concatenate(contexts), np.concatenate(successors), np.concatenate(weights))


def held(levels: tuple[Level, ...]) -> list[int]:
    """Rows in use, by level, the shortest context first."""
    return [int((np.asarray(level.successors)[:, 0] >= 0).sum()) for level in reversed(levels)]
