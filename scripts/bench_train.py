"""A training step against its bare matrix products, and memory over many steps.

    python scripts/bench_train.py                       # the run configs of the shipped drafters
    python scripts/bench_train.py --runs configs/runs/smollm2-135m-eagle3.yaml --steps 200 --json train.json

The step is the trainer's own: compiled, with its optimizer, features from the cache on disk, loss and norm looked at
after every step. Texts are random tokens: what they are does not change what a step costs. The products are those of
the step's own program, found in its trace: same shapes, dtypes and chunks, forward and backward, each as often as the
step does it, on arguments that are at hand. Medians of calls in turn, in one process. Resident memory counts what
the process allocated, without files that are mapped. Tables go to stderr, one JSON document to stdout (and to --json).
"""

import argparse
import dataclasses
import functools
import resource
import tempfile
from pathlib import Path

import jax
import numpy as np
from bench_core import finish, header, show

from graft_jax.bench import products
from graft_jax.bench.timing import interleaved
from graft_jax.io.checkpoint import load_target
from graft_jax.training import feature_cache, loop, shards
from graft_jax.training.run import RunConfig, read_run

RUNS = Path(__file__).parent.parent / "configs" / "runs"
SHIPPED = [str(RUNS / f"smollm2-135m-{kind}.yaml") for kind in ("eagle3", "domino")]
BATCHES = 2  # that the step goes through in turn
TEXTS = 3  # in a row


def random_rows(rows: int, length: int, vocab_size: int) -> shards.Rows:
    """Full rows of some texts each, of which the last two thirds are trained on."""
    place = np.arange(length) * TEXTS % length / length
    segments = np.broadcast_to(np.arange(length) * TEXTS // length + 1, (rows, length)).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, length)).astype(np.int32)
    return shards.Rows(tokens, segments, np.broadcast_to(place > 1 / 3, (rows, length)).copy())


def resident() -> float:
    """Megabytes that the process allocated and holds; the peak where the system does not say."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1e3
    return peak()


def peak() -> float:
    """Megabytes, the most that were resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


class Trainer:
    """Steps as `loop.train` runs them."""

    def __init__(self, run: RunConfig, length: int, folder: Path):
        config, target, tokenizer = load_target(run.model, dtype=run.dtype)
        rows = random_rows(BATCHES * run.batch_rows, length, config.num_tokens)
        drafter = run.drafter.config(config, tokenizer)
        self.source = feature_cache.FeatureSource(config, target, drafter.taps, rows, folder, {})
        optimizer, self.state = loop._start(run, drafter, config, target, rows)
        self.advance = functools.partial(loop.stepper(run, drafter, config, optimizer, 1000), target)
        self._rows, self._run, self._done = len(rows), run, 0

    def batch(self):
        return self.source.batch(loop.batch_rows(self._rows, self._run.batch_rows, self._run.seed, self._done))

    def __call__(self) -> float:
        self.state, value, norm, _ = self.advance(self.state, self.batch())
        self._done += 1
        assert np.isfinite(float(value)) and np.isfinite(float(norm))
        return float(value)


def measure(run: RunConfig, length: int, steps: int, repeats: int, folder: Path) -> dict:
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        trainer = Trainer(run, length, folder)
        for _ in range(BATCHES):  # makes the features
            trainer()
        found = products.of(trainer.advance, trainer.state, trainer.batch())
        bare = products.program(found)
        tokens = run.batch_rows * length
        seconds = interleaved({"step": trainer, "products": bare}, repeats)
        memory = []
        for count in (5, steps - 5):
            for _ in range(count):
                trainer()
            memory.append({"resident": resident(), "peak": peak()})
    flops = sum(product.flops * count for product, count in found.items())
    return {
        "run": run.name, "dtype": run.dtype, "tokens": tokens,
        "step_ms": 1e3 * seconds["step"], "products_ms": 1e3 * seconds["products"],
        "step_tokens_per_second": tokens / seconds["step"],
        "products_tokens_per_second": tokens / seconds["products"],
        "ratio": seconds["products"] / seconds["step"], "gflop": flops / 1e9,
        "resident_mb_after_5": memory[0]["resident"], f"resident_mb_after_{steps}": memory[1]["resident"],
        "peak_mb_after_5": memory[0]["peak"], f"peak_mb_after_{steps}": memory[1]["peak"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--runs", nargs="+", default=SHIPPED, metavar="RUN.yaml")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-rows", type=int, help="rows of a step; the run's if not given")
    parser.add_argument("--steps", type=int, default=50, help="over which memory is watched, at least 6")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="also write the JSON document here")
    args = parser.parse_args()
    if args.steps < 6:
        parser.error(f"--steps {args.steps} must be at least 6")
    rows = []
    for path in args.runs:
        run = read_run(path)
        if args.batch_rows:
            run = dataclasses.replace(run, batch_rows=args.batch_rows)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(run, args.length, args.steps, args.repeats, Path(folder) / "features"))
    report = header() | {"steps": rows}
    for row in rows:
        show(row["run"], [row])
    finish(report, args.json)


if __name__ == "__main__":
    main()
