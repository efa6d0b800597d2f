"""Writes docs/portability.md from what `make test-portability` recorded, with one or several versions of JAX.

python scripts/portability_table.py
python scripts/portability_table.py --records build/portability --out docs/portability.md
"""

import argparse
import json
from pathlib import Path
from typing import Any

HEADER = """# Portability

Made by `scripts/portability_table.py` from what `make test-portability` recorded; do not edit.

Every method's whole round (`decode_step`) and whole generation (`run`) is lowered to one module, without any call to
the host, and compiled ahead of time by the platform's own compiler on a machine that has no such chip: sm_90 (H100,
H200) by the CUDA plugin, TPU v5e and v6e by libtpu. Shapes are those of the published targets and drafters in
`configs/`, bfloat16, batch 1, rows of {length} tokens. Nothing was run: these are compilers' statements, not speeds.

*Rows* are tree nodes with the root. *Kernels* are the Pallas kernels whose custom calls stand inside the round's own
module. *Memory* is arguments (weights, cache, table) and temporaries as the compiler states them, in GB (10^9 bytes).
FLOPs and bytes of `decode_step` are the compiler's cost analysis relative to the target's bare pass over the same rows
with its head; the CUDA compiler gives none, and bodies of loops count once. Seconds are those of one machine, shared
with other work.
"""
COLUMNS = ("method", "target", "chip", "rows", "function", "compiles", "lower s", "compile s", "memory GB",
           "temporaries MB", "FLOPs / verify", "bytes / verify", "kernels")  # fmt: skip


def read(folder: Path) -> list[dict[str, Any]]:
    """Records, the last one of a kind."""
    found = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[tuple(record[name] for name in ("jax", "model", "target", "method", "function"))] = record
    return list(found.values())


def verify_of(records: list[dict[str, Any]], record: dict[str, Any]) -> dict[str, Any]:
    """The bare pass of the same target, chip and rows."""
    keys = ("jax", "model", "target", "rows")
    same = [r for r in records if r["function"] == "verify" and all(r[key] == record[key] for key in keys)]
    return same[0] if same else {}


def ratio(part: dict[str, Any], whole: dict[str, Any], name: str) -> str:
    if not part.get(name) or not whole.get(name):
        return "-"
    return f"{part[name] / whole[name]:.2f}"


def table(records: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    for r in records:
        verify = verify_of(records, r) if r["function"] == "decode_step" else {}
        done = "compile_seconds" in r
        cells = (
            r["method"], r["model"], r["target"], r["rows"], r["function"], "yes" if done else "only lowered",
            f"{r['lower_seconds']:.1f}", f"{r['compile_seconds']:.1f}" if done else "-",
            f"{(r['argument_bytes'] + r['temp_bytes']) / 1e9:.2f}" if done else "-",
            f"{r['temp_bytes'] / 1e6:.0f}" if done else "-",
            ratio(r, verify, "flops"), ratio(r, verify, "bytes"), ", ".join(r["kernels_found"]) or "none",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("build/portability"), help="folder of JSON lines")
    parser.add_argument("--out", type=Path, default=Path("docs/portability.md"))
    args = parser.parse_args()
    records = read(args.records)
    if not records:
        raise SystemExit(f"{args.records} holds no records; run `make test-portability` first")
    records.sort(key=lambda r: (r["model"] != "qwen3-4b", r["target"], r["method"], r["function"]))
    parts = [HEADER.format(length=records[0]["max_length"])]
    for version in sorted({r["jax"] for r in records}):
        own = [r for r in records if r["jax"] == version]
        parts.append(f"## JAX {version}\n\n{table(own)}\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(parts))
    print(f"{args.out}: {len(records)} records")


if __name__ == "__main__":
    main()
