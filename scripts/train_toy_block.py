"""Trains a small DFlash and a small Domino drafter for the toy llama: `python scripts/train_toy_block.py`.

Deterministic on one machine and version. Texts are half the target's own greedy continuations, half the
language's. Stores both under tests/toy in z-lab's format, in bfloat16, and prints what they accept: for each
policy the mean tokens a round, bonus included, on prompts that were not trained on.
"""

import argparse
import dataclasses
import functools
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from toy import load, plain, store  # noqa: E402

from graft_jax.drafters.dflash import Chain, DFlash, Marginal  # noqa: E402
from graft_jax.drafters.domino import Corrected  # noqa: E402
from graft_jax.engine import SpeculativeDecoder  # noqa: E402
from graft_jax.io.block_drafter import load_block_drafter, save_block_drafter  # noqa: E402
from graft_jax.models import cache as kv  # noqa: E402
from graft_jax.models import dflash, transformer  # noqa: E402
from graft_jax.models.dflash_config import DFlashConfig, DominoConfig  # noqa: E402
from graft_jax.training import block_losses  # noqa: E402

NAMES = ("dflash", "domino")
MASK, BLOCK, GAMMA = 310, 8, 4.0
ROWS, LENGTH, ANCHORS = 16, 128, 16
HEAD = DominoConfig(gru_size=64, rank=32, prefix=1, shift=True)
TAPS = (2, 4)  # the format's rule would take one layer twice: the target has but four
BUDGET = 8


def texts(config, target, count: int) -> np.ndarray:
    """[count, LENGTH]: greedy continuations of beginnings of documents, with the beginnings."""
    prompts = plain.sample_prompts(1_000, count, 16, 16)
    lines, _ = plain.greedy(config, target, prompts, LENGTH - 16)
    return np.concatenate([np.array(prompts), lines], axis=1).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 2))
def features(config, target, taps, tokens):
    B, T = tokens.shape
    out = transformer.forward(
        config, target, tokens, jnp.broadcast_to(jnp.arange(T), (B, T)),
        jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T)), kv.init(config, B, 1, jnp.float32),
        jnp.zeros(B, jnp.int32), taps,
    )  # fmt: skip
    return out.taps


def train(name: str, steps: int) -> tuple[DFlashConfig, dflash.DFlashParams]:
    target_config, target = load("llama")
    config = DFlashConfig.for_target(
        target_config, num_layers=2, block_size=BLOCK, mask_token_id=MASK, domino=HEAD if name == "domino" else None
    )
    config = dataclasses.replace(config, taps=TAPS)
    params: Any = dflash.init_params(config, jax.random.key(NAMES.index(name)), jnp.float32, std=0.06)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 20, steps, end_value=1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.0))

    def loss_of(params, taps, tokens, key, step):
        mask = jnp.ones(tokens.shape, bool)
        anchors, keep = block_losses.sample_anchors(key, mask, ANCHORS)
        rest = (target_config, target, taps, tokens, mask, anchors, keep, GAMMA)
        return block_losses.block_loss(config, params, *rest, block_losses.base_anchor(step, steps))[0]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, taps, tokens, key, step):
        loss, grads = jax.value_and_grad(loss_of)(params, taps, tokens, key, step)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(NAMES.index(name))
    own = texts(target_config, target, 1536)
    state, started, losses = optimizer.init(params), time.perf_counter(), []
    for i in range(steps):
        half = own[rng.integers(0, len(own), ROWS // 2)]
        tokens = np.concatenate([half, plain.language().rows(rng, ROWS // 2, LENGTH)[0]])
        taps = features(target_config, target, config.taps, jnp.asarray(tokens, jnp.int32))
        key = jax.random.fold_in(jax.random.key(7), i)
        params, state, loss = update(params, state, taps, jnp.asarray(tokens, jnp.int32), key, jnp.int32(i))
        losses.append(loss)
        if i % 100 == 99:
            mean, seconds = float(jnp.mean(jnp.stack(losses[-100:]))), time.perf_counter() - started
            print(f"{name} step {i + 1:5d} loss {mean:.3f} {seconds:5.0f} s", flush=True)
    return config, params


def measure(temperature: float, count: int = 24, new: int = 160) -> dict[str, float]:
    """Tokens a round of every policy of the stored drafters."""
    target_config, target = load("llama")
    prompts = plain.sample_prompts(0, count, 16, 48)
    policies = {
        "dflash": ("dflash", Chain(BLOCK - 1)),
        "ddtree": ("dflash", Marginal(BUDGET)),
        "domino base": ("domino", Chain(BLOCK)),
        "domino": ("domino", Corrected(BLOCK, "chain", 0)),
        "marginal": ("domino", Marginal(BUDGET)),
        "greedy-path": ("domino", Corrected(BUDGET, "greedy-path")),
        "dominotree": ("domino", Corrected(BUDGET, "path")),
        "dominotree full": ("domino", Corrected(BUDGET, "path", normaliser="full")),
        "dominotree all candidates": ("domino", Corrected(BUDGET, "path", candidates=0)),
        "ddtree 16": ("dflash", Marginal(16)),
        "marginal 16": ("domino", Marginal(16)),
        "greedy-path 16": ("domino", Corrected(16, "greedy-path")),
        "dominotree 16": ("domino", Corrected(16, "path")),
        "dominotree 16 full": ("domino", Corrected(16, "path", normaliser="full")),
    }
    out = {}
    for name, (folder, policy) in policies.items():
        config, params = load_block_drafter(store.FOLDER / folder, target_config, dtype="float32")
        engine = SpeculativeDecoder(
            target_config, target, None, DFlash(config, target_config, policy), max_length=256, head=(config, params)
        )
        results = engine.generate(
            prompts, max_new_tokens=new, temperature=temperature, seed=list(range(count)), ignore_eos=True
        )
        out[name] = round(count * new / sum(result.stats.rounds for result in results), 3)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="dflash, domino; both if none")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--measure", action="store_true", help="only measure the stored weights again")
    args = parser.parse_args()
    for name in [] if args.measure else args.names:
        config, params = train(name, args.steps)
        shutil.rmtree(store.FOLDER / name, ignore_errors=True)
        save_block_drafter(store.FOLDER / name, config, dflash.to_bfloat16(params))
    for temperature in (0.0, 1.0):
        print(temperature, measure(temperature))


if __name__ == "__main__":
    main()
