"""One scenario for the target model: chunked prefill, then a tree pass over what was committed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graft_jax.config import ModelConfig
from graft_jax.models import cache as kv
from graft_jax.models import transformer

CHUNK = NODES = 16  # one shape for both kinds of pass: one compilation
CHUNKS = 3
PROMPT = CHUNKS * CHUNK
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6, 7, 7, 9, 11, 14)
GOLDEN_ROWS = list(range(PROMPT - 3, PROMPT + NODES))  # what the stored arrays hold


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


def golden_configs() -> dict[str, dict[str, Any]]:
    """Small models of every family and rope kind, for the stored reference arrays."""
    base = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "head_dim": 8,
        "max_position_embeddings": 64, "rope_theta": 1e4, "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 16}  # fmt: skip
    linear = {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    changes = {
        "llama": {},
        "llama llama3 biased": {"rope_scaling": llama3, "tie_word_embeddings": False, "head_dim": 12,
                                "attention_bias": True, "mlp_bias": True},
        "qwen2 linear": {"rope_scaling": linear, "tie_word_embeddings": False},
        "qwen2 yarn": {"rope_scaling": yarn},
        "qwen3": {"head_dim": 12},
        "qwen3 yarn biased": {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 0.5}, "head_dim": 12,
                              "attention_bias": True, "tie_word_embeddings": False},
    }  # fmt: skip
    return {name: base | {"model_type": name.split()[0]} | change for name, change in changes.items()}


def run(config: ModelConfig, params, prompt, tree) -> tuple[np.ndarray, np.ndarray]:
    """Logits [P + N, V] and taps [3, P + N, M], of the prompt's rows and then of the tree's."""
    cache = kv.init(config, 1, PROMPT + 8, params.dtype)
    logits, taps = [], []
    for start in range(0, PROMPT, CHUNK):
        mask = np.tri(CHUNK, dtype=bool)
        positions = start + np.arange(CHUNK)
        out, block = _step(
            config, params, prompt[None, start : start + CHUNK], positions[None], mask[None], cache, start
        )
        cache = kv.commit_chunk(cache, block, jnp.int32(start), jnp.ones((1, CHUNK), bool))
        logits.append(out[0])
        taps.append(out[1])
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
