"""Measures plain decoding, overhead of a round, acceptance and speedup of methods, memory, compiles.

    python scripts/bench_core.py --data mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --out bench.json
    python scripts/bench_core.py --parts acceptance --data gsm8k.jsonl --methods auto graft:15 --temperatures 0 0.7
    python scripts/bench_core.py --parts overhead
    python scripts/bench_core.py --parts torch      # needs torch and transformers (make test-parity installs them)

Every figure is a ratio or a median of one process; the baseline runs in the same process. Tables go to
stderr, one JSON document to stdout (and to --out).
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from importlib import metadata

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graft_jax import decode, sampling
from graft_jax.bench import stages
from graft_jax.bench.datasets import loops, read_first_turns
from graft_jax.bench.timing import interleaved
from graft_jax.compare import difference
from graft_jax.drafters.empty import Empty
from graft_jax.drafters.graft import Graft, Stage
from graft_jax.engine import SpeculativeDecoder
from graft_jax.retrieval.adjacency import SuccessorTable
from graft_jax.tree import templates

console = Console(stderr=True)
PARTS = ("memory", "overhead", "acceptance", "torch")


def overhead(model: str, dtype: str) -> list[dict]:
    """Fused round against the target's forward pass of the same rows, both inside a while_loop.

    The table is filled with the text's own successors, so trees are full; the path depends on the logits.
    """
    decoder = SpeculativeDecoder.from_pretrained(model, method="ar", dtype=dtype, max_length=512)
    params, config = decoder.params, decoder.config
    rows = []
    for N in (8, 16, 61):
        template = (templates.NARROW if N <= 16 else templates.GRAFT_FULL).prefix(N - 1)
        table = SuccessorTable(config.vocab_size, order=3)
        drafter = Graft(Empty(), table, (Stage(0, template),), template, N - 1)
        spec = dataclasses.replace(decoder.spec, drafter=drafter)
        for name, settings in (("T=0", {}), ("T=0.8 top-p 0.95", {"temperature": 0.8, "top_p": 0.95})):
            # Every token has successors in the table: all N - 1 nodes are valid in every round.
            state = stages.start(spec, params, **settings)
            timed = _round_and_forward(spec, params, state, rounds=8)
            rows.append(
                {
                    "rows": N,
                    "settings": name,
                    "round_ms": timed["round"] * 1e3,
                    "forward_ms": timed["forward"] * 1e3,
                    "overhead": timed["round"] / timed["forward"] - 1,
                }
            )
            console.print(rows[-1])
    return rows


def _round_and_forward(spec, params, state, rounds: int) -> dict[str, float]:
    """Seconds of a whole round, and of the target's forward over the same rows with a commit."""
    N = spec.drafter.capacity + 1

    @jax.jit
    def fused(params, state):
        return decode.run(spec, params, state, jnp.int32(rounds)).tokens

    root = state.tokens[jnp.arange(1), state.length]
    draft, _ = spec.drafter.draft(params, state.draft, root, state.length, state.active)
    assert int(draft.tree.valid.sum()) == N

    @jax.jit
    def bare(params, state, tree):
        def step(carry):
            i, cache, length, tokens = carry
            tree_now = tree.replace(tokens=tokens)
            logits, _, block = decode._verify(spec, params, tree_now, cache, length, state.active)
            # The next tokens depend on the logits, so that no pass can be hoisted out of the loop.
            token = sampling.first_argmax(logits[:, 0])
            tokens = tokens.at[:, 0].set(token)
            cache = decode.kv.commit(cache, block, token[:, None] % 2 + jnp.arange(1)[None, :], length)
            return i + 1, cache, length + 1, tokens

        start = (jnp.int32(0), state.cache, state.length, tree.tokens)
        return jax.lax.while_loop(lambda c: c[0] < rounds, step, start)[3]

    times = interleaved(
        {"round": lambda: fused(params, state), "forward": lambda: bare(params, state, draft.tree)}, repeats=9
    )
    return {name: seconds / rounds for name, seconds in times.items()}


def acceptance(
    model: str, dtype: str, files: list[str], limit: int, new_tokens: int, methods: list[str],
    temperatures: list[float], table: str | None,
) -> list[dict]:  # fmt: skip
    """Methods and plain decoding, prompt by prompt, each after the other; a table lives on from prompt to prompt.

    Args:
        methods: names, with the tree's nodes where they are not the method's own: "graft", "graft:15".
        table: what methods that retrieve start with, see `from_pretrained`.
    """
    rows, decoders = [], {}
    for given in methods:
        name, _, nodes = given.partition(":")
        options = {"budget": int(nodes)} if nodes else {}
        decoders[given] = SpeculativeDecoder.from_pretrained(
            model, method=name, dtype=dtype, max_length=1024, table=table, on_status=console.print, **options
        )
    plain = next(iter(decoders.values())).with_method("ar")
    everyone = {"ar": plain, **decoders}
    for decoder in everyone.values():  # compile and touch everything once
        decoder.generate("Hello there", max_new_tokens=8)
    for temperature in temperatures:
        for decoder in decoders.values():
            decoder.reset_memory()
        records: dict[str, list[dict]] = {name: [] for name in decoders}
        settings = dict(max_new_tokens=new_tokens, temperature=temperature)
        for path in files:
            name = os.path.splitext(os.path.basename(path))[0]
            for i, prompt in enumerate(
                track(read_first_turns(path, limit), f"{name}, T={temperature}", console=console)
            ):
                order = list(everyone)
                order = order[i % len(order) :] + order[: i % len(order)]
                outs = {key: everyone[key].generate(prompt, **settings) for key in order}
                for key in decoders:
                    found = _record(plain, prompt, outs["ar"], outs[key], settings)
                    records[key].append({"file": name, **found})
        for given, decoder in decoders.items():
            facts = {"method": given, "drafts": decoder.method, "nodes": decoder.spec.drafter.capacity}
            rows += _summaries(records[given], {**facts, "temperature": temperature, "dtype": dtype})
    return rows


def _record(plain, prompt, base, mine, settings) -> dict:
    at, margin = difference(plain, prompt, base, mine, settings)
    return {
        "loops": loops(base.token_ids), "emitted": len(mine.token_ids), "rounds": mine.stats.rounds,
        "seconds": mine.stats.decode_seconds, "base_emitted": len(base.token_ids),
        "base_seconds": base.stats.decode_seconds, "equal": at is None, "margin": margin,
    }  # fmt: skip


def _summaries(records: list[dict], settings: dict) -> list[dict]:
    groups = {name: [r for r in records if r["file"] == name] for name in dict.fromkeys(r["file"] for r in records)}
    groups["all"] = records
    groups["all, no looping answers"] = [r for r in records if not r["loops"]]
    rows = []
    for name, group in groups.items():
        total = {
            key: sum(r[key] for r in group) for key in ("emitted", "rounds", "seconds", "base_emitted", "base_seconds")
        }
        if not total["rounds"]:
            continue
        rows.append({
            **settings, "set": name, "prompts": len(group),
            "acceptance": total["emitted"] / total["rounds"],
            "tokens_per_second": total["emitted"] / total["seconds"],
            "plain_tokens_per_second": total["base_emitted"] / total["base_seconds"],
            "speedup": total["emitted"] / total["seconds"] / (total["base_emitted"] / total["base_seconds"]),
            "different": sum(not r["equal"] for r in group),
            "largest_margin": max((abs(r["margin"]) for r in group if r["margin"] is not None), default=None),
        })  # fmt: skip
    return rows


def against_torch(model: str, new_tokens: int, prompts: list[str]) -> list[dict]:
    """Plain decoding beside transformers on torch: same weights, prompts and dtype, in one process."""
    import torch
    import transformers

    from graft_jax.io.checkpoint import save_hf

    rows = []
    for dtype in ("bfloat16", "float32"):
        decoder = SpeculativeDecoder.from_pretrained(model, method="ar", dtype=dtype, max_length=1024)
        folder = f"/tmp/graft_jax_bench_{dtype}"
        if not os.path.exists(folder):
            save_hf(folder, decoder.config, decoder.params.target)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        decoder.generate("Hello there", max_new_tokens=8)
        mine_s = theirs_s = 0.0
        count = equal = 0
        for prompt in prompts:
            out = decoder.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
            ids = decoder.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            with torch.inference_mode():
                cache = transformers.DynamicCache()
                tokens = torch.tensor([ids])
                logits = theirs(tokens, past_key_values=cache, use_cache=True).logits
                new = [int(logits[0, -1].argmax())]
                start = time.perf_counter()
                while len(new) < new_tokens:
                    logits = theirs(torch.tensor([new[-1:]]), past_key_values=cache, use_cache=True).logits
                    new.append(int(logits[0, -1].argmax()))
                theirs_s += time.perf_counter() - start
            mine_s += out.stats.decode_seconds
            count += new_tokens - 1
            equal += new == out.token_ids
        rows.append(
            {
                "dtype": dtype,
                "prompts": len(prompts),
                "equal_outputs": equal,
                "tokens_per_second": count / mine_s,
                "transformers_tokens_per_second": count / theirs_s,
                "ratio": theirs_s / mine_s,
            }
        )
        console.print(rows[-1])
    return rows


def memory(model: str) -> list[dict]:
    """Peak resident memory of a fresh process that loads, compiles and generates at max_length 2048."""
    rows = []
    program = (
        "import resource, sys, graft_jax\n"
        "d = graft_jax.SpeculativeDecoder.from_pretrained(sys.argv[1], method='recycling', dtype=sys.argv[2],"
        " max_length=2048)\n"
        "import jax\n"
        "w = sum(x.nbytes for x in jax.tree.leaves(d.params))\n"
        "o = d.generate('Tell me a story about a fox and a lighthouse.', max_new_tokens=64)\n"
        "print(w / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, o.stats.compile_seconds,"
        " len(d.programs.compiled))\n"
    )
    for dtype in ("bfloat16", "float32"):
        out = subprocess.run([sys.executable, "-c", program, model, dtype], capture_output=True, text=True, check=True)
        weights, peak, seconds, programs = map(float, out.stdout.split())
        bound = 2.2 * weights + 450
        rows.append({"dtype": dtype, "weights_mb": weights, "peak_mb": peak, "bound_mb": bound,
                     "compile_seconds": seconds, "programs": int(programs)})  # fmt: skip
        console.print(rows[-1])
    return rows


def show(title: str, rows: list[dict]) -> None:
    if not rows:
        return
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()])
    console.print(table)


def header(**facts: str) -> dict:
    """What a report says of where its figures come from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        **facts, "commit": commit, "device": str(jax.devices()[0]), "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
    }  # fmt: skip


def finish(report: dict, out: str | None) -> None:
    """One JSON document to stdout, and to a file if one was named."""
    text = json.dumps(report)
    print(text)
    if out:
        with open(out, "w") as file:
            file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", nargs="*", default=[], help="JSON-lines files with `turns`")
    parser.add_argument("--limit", type=int, default=20, help="prompts a file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--methods", nargs="*", default=["auto"], metavar="NAME[:NODES]")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0])
    parser.add_argument("--table", default="auto", help="retrieval table to start with: auto, none or a file")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["memory", "overhead", "acceptance"])
    parser.add_argument("--out")
    args = parser.parse_args()
    report = header(model=args.model)
    runs = {
        "memory": functools.partial(memory, args.model),
        "overhead": functools.partial(overhead, args.model, args.dtype),
        "acceptance": functools.partial(
            acceptance, args.model, args.dtype, args.data, args.limit, args.new_tokens, args.methods,
            args.temperatures, None if args.table == "none" else args.table,
        ),
        "torch": functools.partial(
            against_torch, args.model, args.new_tokens,
            ["Why is the sky blue?", "Write a short story about a lighthouse.", "What is 17 times 23?"],
        ),
    }  # fmt: skip
    for part in args.parts:
        report[part] = runs[part]()
        show(part, report[part])
    finish(report, args.out)


if __name__ == "__main__":
    main()
