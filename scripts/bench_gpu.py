"""Measures kernels and rounds on a GPU (or TPU): one run, under four minutes from a cold start, answers everything.

    python scripts/bench_gpu.py --out gpu.json
    python scripts/bench_gpu.py --dry-run           # at toy size, on a CPU, kernels interpreted: shows that it runs

Kernels: numerics against XLA's version, and microseconds of a call beside XLA's and beside the time that the bytes and
operations need at the device's peak. Rounds: published shapes with random bfloat16 weights, in stages and fused, plain
decoding beside them, and the speedup that follows at the acceptance lengths that the papers report. Tables go to
stderr, one JSON document to stdout (and to --out).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from graft_jax.bench import kernels, portability, stages
from graft_jax.methods import METHODS
from pallas_kernels import dispatch

console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
CONFIGS = Path(__file__).parent.parent / "configs"
MODELS = ("qwen3-4b", "qwen3-8b")
BENCHED = ("recycling", "eagle3", "graft", "dflash", "ddtree", "dominotree")  # those of them that exist
# Tokens a round at temperature 0, bonus included: Graft's table 1 (mean of five sets; Token Recycling, EAGLE-3 and
# Graft), and DominoTree's overall means (DFlash, DDTree with 16 nodes, DominoTree).
ACCEPTANCE = {
    ("recycling", "qwen3-8b"): 2.47, ("eagle3", "qwen3-8b"): 3.65, ("graft", "qwen3-8b"): 3.76,
    ("dflash", "qwen3-4b"): 6.25, ("ddtree", "qwen3-4b"): 7.03, ("dominotree", "qwen3-4b"): 7.98,
    ("dflash", "qwen3-8b"): 6.12, ("ddtree", "qwen3-8b"): 6.91, ("dominotree", "qwen3-8b"): 8.09,
}  # fmt: skip
GOALS = {"builder, 16 nodes": ("build_ms", 0.5), "table update and commit": ("table_update_and_commit_ms", 0.3),
         "round outside target's and drafter's products": ("outside_products", 0.15)}  # fmt: skip

KERNEL_COLUMNS = ("kernel", "shape", "implementation", "equal", "score_error", "kernel_us", "xla_us", "floor_us")
ROUND_COLUMNS = ("model", "method", "rows", "plain_ms", "round_ms", "draft_ms", "build_ms", "verify_ms", "accept_ms",
                 "commit_ms", "update_ms", "observe_ms", "outside_products", "sum_of_stages",
                 "implied_speedup")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured: calls in one program, repeats of it, rounds of a run."""

    calls: int = 20
    repeats: int = 7
    rounds: int = 16


def versions() -> dict[str, object]:
    device = jax.devices()[0]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=CONFIGS, check=False)
    return {
        "device": device.device_kind, "platform": dispatch.platform_name(), "python": sys.version.split()[0],
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        "commit": commit.stdout.strip() or None,
    }  # fmt: skip


def bench_kernels(size: Size, dry: bool) -> list[dict]:
    own = dispatch.PLATFORMS.get(dispatch.platform_name(), dispatch.XLA)
    own = f"{dispatch.TRITON}{dispatch.INTERPRET}" if dry else own
    rows = []
    for case in kernels.cases(tiny=dry):
        row = {"kernel": case.kernel, "shape": case.shape, "implementation": own, **kernels.numerics(case, own)}
        # An interpreted kernel's time says nothing.
        timed = {"xla": "xla"} if dry else {"kernel": own, "xla": "xla"}
        rows.append({**row, **kernels.measure(case, timed, size.calls, size.repeats)})
    return rows


def bench_rounds(model: str, benched: Sequence[str], size: Size, dry: bool, until: float) -> list[dict]:
    """Plain decoding, and the round of every benched method; those for which no time is left are named."""
    rows, plain = [], 0.0
    target = None
    for method in ("ar", *(name for name in benched if name in METHODS)):
        if not portability.available(CONFIGS, method, model):
            continue
        if time.monotonic() > until:
            rows.append({"model": model, "method": method, "skipped": "out of time"})
            continue
        for nodes in (None, 16) if method in ("recycling", "graft") and not dry else (None,):
            options = {} if nodes is None else {"budget": nodes - 1}
            spec, abstract, thresholds = portability.build(CONFIGS, method, model, small=dry, **options)
            # Gates stay open: the dearest round.
            shapes = dataclasses.replace(abstract, target=None)
            params = stages.random_params(shapes if target is not None else abstract, (-1.0,) * len(thresholds))
            params = params if target is None else params.replace(target=target)
            target = params.target
            state = stages.start(spec, params)
            seconds = stages.fused(spec, params, state, size.rounds, size.repeats)
            if method == "ar":
                plain = seconds
                rows.append({"model": model, "method": method, "rows": 1, "round_ms": seconds * 1e3})
                continue
            parts = stages.by_stage(spec, params, state, size.calls, size.repeats)
            row = {"model": model, "method": method, "rows": spec.drafter.capacity + 1}
            row |= stages.summary(seconds, parts, plain)
            length = ACCEPTANCE.get((method, model))
            if length is not None and nodes is None and not dry:
                row |= {"paper_acceptance": length, "implied_speedup": length * plain / seconds}
            rows.append(row)
    return rows


def goals(rounds: list[dict]) -> list[dict]:
    found = []
    for row in (row for row in rounds if "build_ms" in row):
        for name, (key, limit) in GOALS.items():
            if key == "outside_products" or (row["build_ms"] > 0 and (key != "build_ms" or row["rows"] == 16)):
                found.append({"goal": name, "model": row["model"], "method": row["method"], "rows": row["rows"],
                              "limit": limit, "found": row[key], "met": row[key] < limit})  # fmt: skip
    return found


def show(title: str, rows: list[dict], columns: tuple[str, ...]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        cells = (row.get(column) for column in columns)
        table.add_row(*("-" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in cells))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, kernels interpreted; times mean nothing")
    parser.add_argument("--out", type=Path, help="also write the JSON document here")
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of configs/models")
    parser.add_argument("--methods", nargs="+", default=BENCHED, help="methods to measure beside plain decoding")
    parser.add_argument("--seconds", type=float, default=210.0, help="no new method is begun after that time")
    args = parser.parse_args()
    if not args.dry_run and jax.default_backend() == "cpu":
        raise SystemExit("there is no accelerator here; --dry-run runs at toy size on a CPU")
    began = time.monotonic()
    size = Size(2, 2, 3) if args.dry_run else Size()
    report: dict = {"versions": versions(), "dry_run": args.dry_run}
    report["kernels"] = bench_kernels(size, args.dry_run)
    show("kernels", report["kernels"], KERNEL_COLUMNS)
    models, report["rounds"] = list(args.models), []
    for i, model in enumerate(models):
        left = args.seconds - (time.monotonic() - began)
        until = time.monotonic() + left / (len(models) - i)
        report["rounds"] += bench_rounds(model, args.methods, size, args.dry_run, until)
    show("rounds, ms", report["rounds"], ROUND_COLUMNS)
    report["goals"] = goals(report["rounds"])
    show("goals", report["goals"], ("goal", "model", "method", "rows", "limit", "found", "met"))
    report["seconds"] = time.monotonic() - began
    text = json.dumps(report)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    if not all(row["equal"] for row in report["kernels"]):
        raise SystemExit("a kernel differs from the reference")


if __name__ == "__main__":
    main()
