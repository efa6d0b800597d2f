"""Trains the toy EAGLE-3 heads and stores them under tests/toy: `python scripts/train_toy_eagle3.py`.

One head in the reference's layout on the llama target, one with EAGLE-3.1's norms in speculators' layout on
the qwen3 target. Prints loss and accuracy by training-time-test step.
"""

import argparse
import functools
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from toy import FOLDER, load, plain  # noqa: E402

from graft_jax.io.drafter import save_eagle3  # noqa: E402
from graft_jax.models import eagle3  # noqa: E402
from graft_jax.models.eagle3_config import Eagle3Config  # noqa: E402
from graft_jax.training import features, losses, step  # noqa: E402

DRAFT_VOCAB = 256
VARIANTS = {
    "llama": {},
    "qwen3": dict(layout="speculators", fc_norm=True, recurse_normed=True, norm_before_residual=True, head_dim=16),
}
ROWS, LENGTH, TTT = 16, 160, 6


def draft_vocabulary(best: np.ndarray) -> np.ndarray:
    """The ids that the target chooses most, sorted."""
    counts = np.bincount(best.ravel(), minlength=DRAFT_VOCAB)
    return np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB])


def train(name: str, steps: int) -> None:
    target_config, target = load(name)
    config = Eagle3Config.for_target(target_config, draft_vocab_size=DRAFT_VOCAB, **VARIANTS[name])
    extract = jax.jit(functools.partial(features.extract, target_config, target, config.taps))
    rng = np.random.default_rng([7, len(name)])
    mask = jnp.ones((ROWS, LENGTH), bool)

    def batch() -> features.Features:
        return extract(jnp.asarray(plain.language().rows(rng, ROWS, LENGTH)[0]), mask)

    ids = draft_vocabulary(np.concatenate([np.asarray(batch().best) for _ in range(8)]))
    params = eagle3.init_params(config, jax.random.key(3), jnp.float32, std=0.05)
    params = params.replace(draft_to_target=jnp.asarray(ids, jnp.int32))
    optimizer = step.make_optimizer(steps, peak=6e-3)
    state = step.init(optimizer, params)

    def loss(params, batch, step):
        return losses.eagle3_loss(config, params, target, batch, steps=TTT)

    advance = jax.jit(functools.partial(step.train_step, loss, optimizer), donate_argnums=0)
    started = time.perf_counter()
    for i in range(steps):
        state, value, _, metrics = advance(state, batch())
        if i % 100 == 99:
            accuracy = " ".join(f"{x:.3f}" for x in np.asarray(metrics.accuracy))
            print(f"{name} {i + 1:5d} loss {float(value):.3f} accuracy {accuracy} "
                  f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
    folder = FOLDER / f"{name}-eagle3"
    shutil.rmtree(folder, ignore_errors=True)
    save_eagle3(folder, config, eagle3.to_bfloat16(state.params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(VARIANTS), help="targets; all if none")
    parser.add_argument("--steps", type=int, default=2500)
    args = parser.parse_args()
    for name in args.names:
        train(name, args.steps)


if __name__ == "__main__":
    main()
