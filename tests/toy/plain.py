"""Plain decoding of the toy targets, prompts, and measures of text. Slow and obvious."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models import cache as kv
from graft_jax.models import transformer
from graft_jax.models.transformer import TargetParams
from graft_jax.types import Array, Float, Int
from toy.language import BOS, Language
from toy.store import facts


@functools.cache
def language() -> Language:
    """The language that the targets were trained on."""
    return Language(seed=0)


def sample_prompts(seed: int, count: int, min_len: int, max_len: int) -> list[list[int]]:
    """Beginnings of documents that go on for at least 450 tokens more.

    Args:
        seed: fixes the prompts.
        count: how many.
        min_len, max_len: bounds of the lengths, both included, at most 300. A header takes 15 tokens.
    """
    rng = np.random.default_rng([seed, 1])
    prompts = []
    for _ in range(count):
        length = int(rng.integers(min_len, max_len + 1))
        tokens, _ = language().document(rng, first=int(rng.integers(0, 16)))
        prompts.append(tokens[:length])
    return prompts


def safe_prompts(name: str, count: int) -> list[list[int]]:
    """Prompts of 16 to 48 tokens whose first 64 greedy float32 tokens all have margins above 1e-2."""
    seeds = facts(name)["safe_seeds"]
    if count > len(seeds):
        raise ValueError(f"{count=} prompts were asked for, and {len(seeds)} are listed")
    return [sample_prompts(seed, 1, 16, 48)[0] for seed in seeds[:count]]


@functools.partial(jax.jit, static_argnums=0)
def causal_logits(config: ModelConfig, params: TargetParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Logits of every row from one pass over whole texts, with an empty cache."""
    B, T = tokens.shape
    out = transformer.forward(
        config, params, tokens,
        positions=jnp.broadcast_to(jnp.arange(T), (B, T)),
        mask=jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T)),
        cache=kv.init(config, B, 1, params.dtype),
        cached=jnp.zeros(B, jnp.int32),
    )  # fmt: skip
    return transformer.logits(config, params, out.hidden)


def min_margin(config: ModelConfig, params: TargetParams, prompt: Sequence[int], num_tokens: int) -> float:
    """The smallest distance between the best and the second logit along a greedy continuation.

    Every token comes from a full pass over the text so far (padded behind, which causality hides).
    """
    line = np.zeros((1, -(-(len(prompt) + num_tokens) // 64) * 64), np.int32)
    line[0, : len(prompt)] = prompt
    smallest = np.inf
    for at in range(len(prompt), len(prompt) + num_tokens):
        row = np.asarray(causal_logits(config, params, line)[0, at - 1])
        second, best = np.partition(row, -2)[-2:]
        smallest = min(smallest, float(best - second))
        line[0, at] = row.argmax()
    return smallest


def greedy(
    config: ModelConfig, params: TargetParams, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuations of a batch, one token a pass over the cache; EOS stops nothing.

    Returns:
        The new tokens, and the margin of each over the second best: int and float [B, num_tokens].
    """
    longest = max(map(len, prompts)) + num_tokens
    forced = np.full((len(prompts), longest), -1, np.int32)
    for row, prompt in zip(forced, prompts, strict=True):
        row[: len(prompt)] = prompt
    tokens, margins = (np.asarray(x) for x in _greedy(config, params, jnp.asarray(forced)))
    take = np.stack([np.arange(len(p), len(p) + num_tokens) for p in prompts])
    return np.take_along_axis(tokens, take, 1), np.take_along_axis(margins, take, 1)


@functools.partial(jax.jit, static_argnums=0)
def _greedy(config, params, forced):
    B, S = forced.shape
    one = jnp.ones((B, 1, 1), bool)

    def step(carry, at):
        cache, chosen, margin = carry
        token = jnp.where(forced[:, at] >= 0, forced[:, at], chosen)
        lengths = jnp.full(B, at, jnp.int32)
        out = transformer.forward(config, params, token[:, None], lengths[:, None], one, cache, lengths)
        cache = kv.commit(cache, out.block, jnp.zeros((B, 1), jnp.int32), lengths)
        best, ids = jax.lax.top_k(transformer.logits(config, params, out.hidden)[:, 0], 2)
        return (cache, ids[:, 0], best[:, 0] - best[:, 1]), (token, margin)

    start = (kv.init(config, B, S, params.dtype), jnp.full(B, BOS, jnp.int32), jnp.zeros(B, jnp.float32))
    _, (tokens, margins) = jax.lax.scan(step, start, jnp.arange(S, dtype=jnp.int32))
    return tokens.T, margins.T


def distinct_4grams(tokens: Sequence[int]) -> float:
    """The share of a text's 4-grams that are new: 1 without any repetition, near 0 in a loop."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:]))
    return len(set(grams)) / len(grams)


def successor_table(texts: np.ndarray, order: int = 1, width: int = 8) -> dict[tuple[int, ...], list[int]]:
    """The `width` most frequent tokens after each context of `order` tokens, the lower id first on ties."""
    counts: dict[tuple[int, ...], dict[int, int]] = {}
    for line in texts.tolist():
        for i in range(order, len(line)):
            row = counts.setdefault(tuple(line[i - order : i]), {})
            row[line[i]] = row.get(line[i], 0) + 1
    return {
        context: sorted(row, key=lambda token, row=row: (-row[token], token))[:width] for context, row in counts.items()
    }


def table_acceptance(
    lines: np.ndarray, tables: Sequence[dict[tuple[int, ...], list[int]]], template: Sequence[tuple[int, ...]]
) -> float:
    """Mean tokens a round, bonus included, when tables draft and `lines` are what the target says.

    Args:
        lines: texts, [count, length]; the first four tokens of each are given.
        tables: by falling order of context; the first that knows the context drafts, node by node.
        template: the nodes as paths of ranks, (0,) being the root's most frequent successor.
    """
    orders = [len(next(iter(table))) for table in tables]
    nodes = set(template)
    rounds = committed = 0
    for line in lines.tolist():
        at = 4
        while at < len(line):
            rounds += 1
            path: tuple[int, ...] = ()
            while at < len(line):
                contexts = (table.get(tuple(line[at - n : at])) for n, table in zip(orders, tables))
                ranked: list[int] = next((row for row in contexts if row), [])
                if line[at] not in ranked or (*path, ranked.index(line[at])) not in nodes:
                    break
                path = (*path, ranked.index(line[at]))
                at += 1
            committed += len(path) + (at < len(line))
            at += 1
    return committed / rounds
