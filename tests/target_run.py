"""One scenario for the target model: chunked prefill, then a tree pass over what was committed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models import cache as kv
from graft_jax.models import transformer

CHUNKS = (16, 16, 8)
PROMPT = sum(CHUNKS)
PARENTS = (-1, 0, 0, 1, 2, 2, 3)
NODES = len(PARENTS)


def paths() -> list[list[int]]:
    """The nodes from the root to each node."""
    found: list[list[int]] = []
    for i, parent in enumerate(PARENTS):
        found.append((found[parent] if parent >= 0 else []) + [i])
    return found


def sample_tokens(vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A prompt [P] and the tokens of the tree [N]."""
    tokens = np.random.RandomState(seed).randint(0, vocab_size, PROMPT + NODES)
    return tokens[:PROMPT], tokens[PROMPT:]


def sample_taps(config: ModelConfig) -> tuple[int, ...]:
    """The input of the first and the second layer, and the output of the last."""
    return (0, 1, config.num_layers)


def run(config: ModelConfig, params, prompt, tree) -> tuple[np.ndarray, np.ndarray]:
    """Logits [P + N, V] and taps [3, P + N, M], of the prompt's rows and then of the tree's."""
    cache = kv.init(config, 1, PROMPT + 8, params.dtype)
    logits, taps, start = [], [], 0
    for size in CHUNKS:
        mask = np.tri(size, dtype=bool)
        positions = start + np.arange(size)
        out, block = _step(config, params, prompt[None, start : start + size], positions[None], mask[None], cache, start)
        cache = kv.commit_chunk(cache, block, jnp.int32(start), jnp.ones((1, size), bool))
        logits.append(out[0])
        taps.append(out[1])
        start += size
    mask = np.zeros((NODES, NODES), bool)
    for i, path in enumerate(paths()):
        mask[i, path] = True
    positions = PROMPT + np.array([len(path) - 1 for path in paths()])
    out, _ = _step(config, params, tree[None], positions[None], mask[None], cache, PROMPT)
    logits.append(out[0])
    taps.append(out[1])
    return np.concatenate(logits), np.concatenate(taps, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _step(config, params, tokens, positions, mask, cache, cached):
    cached = jnp.full(1, cached, jnp.int32)
    tokens, positions = tokens.astype(jnp.int32), positions.astype(jnp.int32)
    out = transformer.forward(config, params, tokens, positions, mask, cache, cached, sample_taps(config))
    taps = jnp.stack([tap[0] for tap in out.taps])
    return (transformer.logits(config, params, out.hidden)[0], taps), out.block
