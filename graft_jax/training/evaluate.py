"""What a drafter is worth while it is trained: held-out loss, and acceptance with the decoding code itself."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.drafters.empty import Empty
from graft_jax.engine import SpeculativeDecoder
from graft_jax.models.transformer import TargetParams
from graft_jax.tokenizer import Tokenizer
from graft_jax.training import shards
from graft_jax.training.feature_cache import FeatureSource
from graft_jax.training.run import RunConfig


def summary(metrics: Any) -> dict[str, list[float]]:
    """Losses and accuracies by step or slot, for a log."""
    return {name: [round(float(x), 5) for x in getattr(metrics, name)] for name in ("losses", "accuracy")}


class Evaluation:
    """Evaluates parameters on the held-out texts of a run; compiles on the first call.

    The acceptance length is that of greedy decoding; with one drafted node, less the token that is always
    gained, it is the acceptance of the first slot, and should lie near the first step's accuracy.
    """

    def __init__(
        self, run: RunConfig, config: Any, target_config: ModelConfig, target: TargetParams, tokenizer: Tokenizer | None
    ):
        self._run, self._config = run, config
        rows = shards.read(run.data_folder, "held_out")
        self._source = FeatureSource(target_config, target, config.taps, rows, None, {})

        def loss(target, params, batch, step):
            return run.drafter.loss(config, target_config, target, run.seed, 1)(params, batch, step)

        # The target is an argument: captured it would be a constant of the program.
        self._loss = functools.partial(jax.jit(loss), target)
        self._prompts = held_out_prompts(rows, run.evaluate_prompts)
        plain = SpeculativeDecoder(
            target_config, target, tokenizer, method="ar", drafter=Empty(), max_length=2 * rows.tokens.shape[1]
        )
        self._plain = plain
        self._decoders: dict[int, SpeculativeDecoder] = {}

    def __call__(self, params: Any) -> dict[str, Any]:
        """Held-out loss and accuracy by step, acceptance length with the run's tree and with one node."""
        found: dict[str, Any] = {}
        rows = self._source.rows
        if len(rows):
            values = []
            for start in range(0, len(rows), self._run.batch_rows):
                index = np.arange(start, start + self._run.batch_rows) % len(rows)
                value, metrics = self._loss(params, self._source.batch(index.tolist()), jnp.int32(0))
                values.append({"loss": float(value), **summary(metrics)})
            found = {
                f"held_out_{name}": np.mean([v[name] for v in values], axis=0).round(5).tolist() for name in values[0]
            }
        if self._prompts:
            stored = self._run.drafter.stored(params) if self._run.dtype == "bfloat16" else params
            for nodes in (1, self._run.evaluate_nodes):
                name = "first_slot_acceptance" if nodes == 1 else "acceptance_length"
                length = self._acceptance(stored, nodes)
                found[name] = round(length - 1 if nodes == 1 else length, 4)
        return found

    def _acceptance(self, params: Any, nodes: int) -> float:
        if nodes not in self._decoders:
            method = self._run.drafter.method
            self._decoders[nodes] = self._plain.with_drafter(method, self._config, params, budget=nodes)
        decoder = self._decoders[nodes]
        decoder.params = decoder.params.replace(drafter=params)
        return acceptance(decoder, self._prompts, self._run.evaluate_tokens)


def acceptance(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    new_tokens: int,
    on_prompt: Callable[[], None] = lambda: None,
) -> float:
    """Tokens a round of greedy decoding over all prompts, the bonus included; a table lives on between them."""
    emitted = rounds = 0
    for prompt in prompts:
        out = decoder.generate(prompt, max_new_tokens=new_tokens)
        emitted += len(out.token_ids)
        rounds += out.stats.rounds
        on_prompt()
    return emitted / max(1, rounds)


def held_out_prompts(rows: shards.Rows, count: int) -> list[list[int]]:
    """The beginnings of up to `count` texts, up to where training starts in them."""
    prompts = []
    for tokens, segments, mask in zip(rows.tokens, rows.segments, rows.mask):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            where = np.flatnonzero(segments == segment)
            trained = np.flatnonzero(mask[where])
            if len(trained) and trained[0] > 0:
                prompts.append(tokens[where[: trained[0]]].tolist())
            if len(prompts) == count:
                return prompts
    return prompts
