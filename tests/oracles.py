"""Slow and obvious counterparts of the library, and a drafter that can be made to fail where we like."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from toy.plain import causal_logits

from graft_jax import sampling
from graft_jax.drafters.base import Draft
from graft_jax.tree.structure import chain


def naive_generate(config, params, prompt, count, settings=None, stops=()):
    """Plain decoding by a full forward pass over the whole text for every token.

    Returns:
        The new tokens, cut behind the first of `stops`, and the smallest margin of a choice over the second best.
    """
    settings = settings or sampling.make([0])
    text, margins = list(prompt), []
    width = -(-(len(prompt) + count) // 64) * 64
    for _ in range(count):
        padded = jnp.array([text + [0] * (width - len(text))])
        logits = causal_logits(config, params, padded)[:, len(text) - 1]
        scores = np.asarray(_scores(logits, settings, jnp.array([len(text)])))[0]
        second, best = np.partition(scores, -2)[-2:]
        margins.append(best - second)
        text.append(int(scores.argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :], float(min(margins))


def safe_seed(config, params, prompt, count, **settings):
    """The first seed from 100 on whose sampled tokens have no margin, noise included, below 1e-2; and the tokens."""
    for seed in range(100, 140):
        tokens, margin = naive_generate(config, params, prompt, count, sampling.make([seed], **settings))
        if margin > 1e-2:
            return seed, tokens
    raise AssertionError("no seed without near-ties")


_scores = jax.jit(sampling.scores)


def process_one(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Sorting, in NumPy: probabilities after temperature, top-k, top-p, min-p."""
    x = np.asarray(logits, np.float64) / temperature
    if top_k:
        x = np.where(x >= np.sort(x)[-min(top_k, len(x))], x, -np.inf)
    if top_p < 1:
        p = np.exp(x - x.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        last = p[order][before < top_p].min()  # ties with the last token needed stay
        x = np.where(p >= last, x, -np.inf)
    p = np.exp(x - x.max())
    if min_p:
        p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def walk(tree, row, choices):
    """The accepted path of one row by recursion: `choices[node]` is the target's token at that node."""

    def go(node):
        token = int(choices[node])
        for child in range(tree.capacity):
            is_child = bool(tree.valid[row, child]) and int(tree.parents[row, child]) == node
            if is_child and int(tree.tokens[row, child]) == token:
                path, tokens = go(child)
                return [node, *path], [token, *tokens]
        return [node], [token]

    return go(0)


def ancestors(parents):
    """Rows of node indices on each node's path, itself included."""
    rows = []
    for i, parent in enumerate(parents):
        rows.append({i} | (rows[parent] if parent >= 0 else set()))
    return rows


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Proposes the true continuation as a chain of K tokens, with one slot made wrong.

    Its memory is `(line [B, S], slot [B])`: the tokens at absolute positions, and which slot of each
    proposal (0 ... K-1) gets another token; K spoils none.
    """

    capacity: int = 7
    num_tokens: int = 300
    taps: tuple[int, ...] = ()
    wants_logits: bool = False

    @property
    def max_depth(self):
        return self.capacity

    def init(self, params, batch, cache_size, memory):
        return memory

    def memory(self, state):
        return state

    def prefill(self, params, state, tokens, next_tokens, positions, valid, taps, logits):
        return state

    def draft(self, params, state, root, length, active):
        line, slot = state
        B, K = root.shape[0], self.capacity
        offsets = jnp.arange(K)[None, :]
        tokens = jnp.take_along_axis(line, jnp.minimum(length[:, None] + 1 + offsets, line.shape[1] - 1), axis=1)
        tokens = jnp.where(offsets == slot[:, None], (tokens + 1) % self.num_tokens, tokens)
        tree = chain(root, tokens, jnp.full(B, K))
        zero = jnp.zeros(B, jnp.int32)
        return Draft(tree, zero, jnp.zeros((B, K), jnp.float32), zero), state

    def observe(self, params, state, tree, verdict, taps, logits):
        return state


def oracle_memory(lines, slots):
    """Memory for `Oracle` from full texts (prompt and continuation) and slots."""
    width = max(map(len, lines))
    padded = np.zeros((len(lines), width), np.int32)
    for row, line in zip(padded, lines):
        row[: len(line)] = line
    return jnp.asarray(padded), jnp.asarray(slots, jnp.int32)


@functools.cache
def tiny(name):
    """TINY-Q or TINY-L with random weights: (config, params).

    The seeds are the first whose 41 greedy tokens after [5, 6, 7, 8] have no margin below 1e-2.
    """
    from tiny_checkpoints import TINY_L, TINY_Q, random_params

    from graft_jax.config import ModelConfig

    config = ModelConfig.from_hf({"q": TINY_Q, "l": TINY_L}[name])
    config = dataclasses.replace(config, num_tokens=300)
    return config, random_params(config, seed={"q": 4, "l": 0}[name])
