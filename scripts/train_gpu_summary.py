"""What `train_gpu.sh` made: tokens, rates, sizes, and acceptance with the decoding code on held-out prompts.

python scripts/train_gpu_summary.py OUT --model smollm2-135m
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graft_jax import provenance
from graft_jax.engine import SpeculativeDecoder
from graft_jax.training import shards
from graft_jax.training.evaluate import held_out_prompts
from graft_jax.training.log import read_log

MIB = 2**20
LARGEST_FILE = 16 * MIB
NODES = 7
# What each method needs of the folder.
METHODS = {
    "recycling": ("table.npz", None), "eagle3": (None, "eagle3"), "graft": ("table.npz", "eagle3"),
    "dominotree": (None, "domino"),
}  # fmt: skip


def trained(folder: Path) -> dict | None:
    """What a run's log says of it."""
    if not (folder / "log.jsonl").is_file():
        return None
    entries = read_log(folder / "log.jsonl")
    steps = [entry for entry in entries if entry["kind"] == "train"]
    tried = [entry for entry in entries if entry["kind"] == "evaluation"]
    plan = folder / "steps.json"
    return {
        "drafter": folder.name, "exported": (folder / "drafter" / "model.safetensors").is_file(),
        "steps": steps[-1]["step"] if steps else 0,
        "planned": json.loads(plan.read_text())["steps"] if plan.is_file() else None,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "tokens_per_second": sorted(entry["tokens_per_second"] for entry in steps)[len(steps) // 2] if steps else None,
        **{name: value for name, value in (tried or [{}])[-1].items() if name not in ("kind", "step", "tokens")},
    }  # fmt: skip


def acceptance(out: Path, model: str, prompts: list[list[int]], new_tokens: int, dtype: str) -> list[dict]:
    """Tokens a round, bonus included, of greedy decoding with 7 nodes."""
    found = []
    for method, (table, run) in METHODS.items():
        drafter = None if run is None else out / run / "drafter"
        needed = [out / table] if table else []
        needed += [] if drafter is None else [drafter / "config.json"]
        if not all(path.exists() for path in needed):
            continue
        length = max(map(len, prompts)) + new_tokens + 1
        decoder = SpeculativeDecoder.from_pretrained(
            model, method=method, drafter=drafter, table=None if table is None else out / table, dtype=dtype,
            max_length=length, budget=NODES,
        )  # fmt: skip
        results = decoder.generate(prompts, max_new_tokens=new_tokens)
        emitted, rounds = sum(len(r.token_ids) for r in results), sum(r.stats.rounds for r in results)
        found.append({"method": method, "nodes": NODES, "prompts": len(prompts), "acceptance_length": emitted / rounds})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    console = Console(width=160)
    manifest = shards.read_manifest(args.out / "data")
    split = manifest["splits"]["train"]
    report = {
        "model": args.model, "device": provenance.device(), "versions": provenance.versions(),
        "data": {name: split[name] for name in ("texts", "rows", "tokens", "trained_tokens")},
        "runs": [found for name in ("eagle3", "domino") if (found := trained(args.out / name))],
    }  # fmt: skip
    files = [args.out / "table.npz", *sorted(args.out.glob("*/drafter/*.safetensors"))]
    report["files"] = [{"file": str(f.relative_to(args.out)), "bytes": f.stat().st_size} for f in files if f.is_file()]
    rows = shards.read(args.out / "data", "held_out")
    prompts = held_out_prompts(rows, args.prompts) if len(rows) else []
    report["acceptance"] = acceptance(args.out, args.model, prompts, args.new_tokens, args.dtype) if prompts else []
    for name in ("runs", "files", "acceptance"):
        entries = report[name]
        if not entries:
            continue
        table = Table(*dict.fromkeys(key for entry in entries for key in entry), title=name)
        for entry in entries:
            table.add_row(*(_shown(entry.get(column.header)) for column in table.columns))
        console.print(table)
    console.print(f"data: {report['data']}")
    for entry in report["files"]:
        if entry["bytes"] > LARGEST_FILE:
            console.print(f"{entry['file']} has {entry['bytes'] / MIB:.1f} MiB, more than {LARGEST_FILE // MIB}")
    (args.out / "summary.json").write_text(json.dumps(report, indent=2) + "\n")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return " ".join(f"{x:.2f}" for x in value)
    return str(value)


if __name__ == "__main__":
    main()
