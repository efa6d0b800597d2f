"""Trains the two toy targets and stores them under tests/toy: `python scripts/train_toy_targets.py`.

Deterministic on one machine and version. Prints the loss against the language's entropy, how rarely greedy
text repeats itself, and what successor tables accept; writes all that and the seeds of safe prompts to
tests/toy/facts.json.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from toy import NUM_TOKENS, VOCAB_SIZE, load, plain, store  # noqa: E402

from graft_jax.config import ModelConfig, RopeConfig  # noqa: E402
from graft_jax.models import transformer  # noqa: E402

CONFIGS = {
    "llama": ModelConfig(
        model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=192, num_layers=4,
        num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position=512,
        rope=RopeConfig(kind="llama3", theta=10000.0, factor=4.0, original_max_position=128),
        num_tokens=NUM_TOKENS, eos_token_ids=(1, 2),
    ),
    # Heads of 32 make queries wider than the model.
    "qwen3": ModelConfig(
        model_type="qwen3", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_layers=6,
        num_heads=4, num_kv_heads=2, head_dim=32, max_position=512, tie_embeddings=True, qk_norm=True,
        num_tokens=NUM_TOKENS, eos_token_ids=(1, 2),
    ),
}  # fmt: skip
SEEDS = {"llama": 1, "qwen3": 2}
STEPS = {"llama": 1600, "qwen3": 1200}
SHORT, LONG = (16, 128), (4, 512)  # rows of a step: short ones are cheap, tests use positions up to 512


def mean_loss(config, params, tokens):
    """Mean cross-entropy in nats of every token after a row's first."""
    logits = plain.causal_logits(config, params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(name: str, steps: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng([SEEDS[name], 2])
    for step in range(steps):
        count, length = LONG if step > 0.4 * steps and step % 3 == 0 else SHORT
        yield plain.language().rows(rng, count, length + 1)[0]


def train(name: str, steps: int) -> transformer.TargetParams:
    config = CONFIGS[name]
    params: Any = transformer.init_params(config, jax.random.key(SEEDS[name]), jnp.float32, std=0.06)
    rate = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 20, steps, end_value=5e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.02))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(functools.partial(mean_loss, config))(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, started = optimizer.init(params), time.perf_counter()
    losses = []
    for i, tokens in enumerate(batches(name, steps)):
        params, state, loss = step(params, state, tokens)
        losses.append(loss)
        if i % 100 == 99:
            mean = float(jnp.mean(jnp.stack(losses[-100:])))
            seconds = time.perf_counter() - started
            print(f"{name} step {i + 1:5d} loss {mean:.3f} {seconds:5.0f} s", flush=True)
    return set_traps(config, params)


def set_traps(config: ModelConfig, params: transformer.TargetParams) -> transformer.TargetParams:
    """Makes the padding rows of the head larger copies of the most frequent tokens' rows."""
    rng = np.random.default_rng(3)
    counts = np.bincount(plain.language().rows(rng, 50, 256)[0].ravel(), minlength=NUM_TOKENS)
    frequent = np.argsort(-counts, kind="stable")[: config.vocab_size - NUM_TOKENS]
    if params.head is None:
        return dataclasses.replace(params, embed=params.embed.at[NUM_TOKENS:].set(1.5 * params.embed[frequent]))
    return dataclasses.replace(params, head=params.head.at[:, NUM_TOKENS:].set(1.5 * params.head[:, frequent]))


def measure(name: str) -> dict:
    """What the stored weights do in float32, by numbers that tests compare with."""
    config, params = load(name)
    tokens, nats = plain.language().rows(np.random.default_rng(4), 64, 257)
    loss = float(jax.jit(functools.partial(mean_loss, config))(params, tokens))
    entropy = float(nats[:, 1:].mean())
    prompts = plain.sample_prompts(0, 20, 16, 48)
    lines, margins = plain.greedy(config, params, prompts, 200)
    distinct = [plain.distinct_4grams(line.tolist()) for line in lines]
    texts = plain.language().rows(np.random.default_rng(5), 400, 256)[0]
    tables = [plain.successor_table(texts, order) for order in (3, 2, 1)]
    chain = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    tree = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    accepted = {
        "table_chain_4": plain.table_acceptance(lines, tables[2:], chain),
        "table_tree_7": plain.table_acceptance(lines, tables[2:], tree),
        "three_tables_tree_7": plain.table_acceptance(lines, tables, tree),
    }
    safe = []
    for seed in range(100):
        prompt = plain.sample_prompts(seed, 1, 16, 48)[0]
        if len(safe) < 16 and plain.min_margin(config, params, prompt, 64) > 1.2e-2:
            safe.append(seed)
    out = {
        "loss": round(loss, 4),
        "entropy": round(entropy, 4),
        "distinct_4grams": {"mean": round(float(np.mean(distinct)), 3), "least": round(min(distinct), 3)},
        "margins_below_0.01": round(float((margins < 0.01).mean()), 5),
        "tokens_a_round": {key: round(value, 3) for key, value in accepted.items()},
        "safe_seeds": safe,
    }
    print(name, json.dumps(out))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CONFIGS), help="llama, qwen3; both if none")
    parser.add_argument("--steps", type=int, help="instead of the steps that the stored weights had")
    parser.add_argument("--measure", action="store_true", help="only measure the stored weights again")
    args = parser.parse_args()
    path = store.FOLDER / "facts.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in args.names:
        if not args.measure:
            store.save(name, CONFIGS[name], train(name, args.steps or STEPS[name]))
        known[name] = measure(name)
        path.write_text(json.dumps({key: known[key] for key in sorted(known)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
