"""`graft-jax calibrate`: warm-up rounds on given prompts, and the gates that pay on this machine."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graft_jax import arguments, provenance
from graft_jax.prompts import encode_prompt, read_prompts

TIMED_RUNS = 3


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "calibrate",
        help="choose gates and thresholds for a draft head on this machine",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("out", metavar="OUT.json", help="file to write, for --calibration")
    parser.add_argument("--prompts", metavar="FILE.jsonl", required=True, help="`prompt`, `messages` or `turns` a line")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="warm-up rounds: prompts to take")
    arguments.add_model(parser)
    arguments.add_method(parser, default="graft")
    arguments.add_sampling(parser)
    arguments.add_template(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="a prompt")
    parser.add_argument("--min-auc", type=float, default=0.6, metavar="A", help="gates that tell less are dropped")
    parser.add_argument("--save-memory", metavar="FILE.npz", help="keep the table that the rounds filled")
    parser.add_argument("--json", action="store_true", help="the file's contents on stdout, nothing else there")


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    if args.calibration:
        raise ValueError("--calibration is what this command makes")
    if args.thresholds is not None:
        raise ValueError("--thresholds are what this command chooses")
    if not 0.5 <= args.min_auc <= 1:
        raise ValueError(f"--min-auc {args.min_auc} must be between 0.5 and 1")
    items = read_prompts(args.prompts)
    if not 1 <= args.rounds <= len(items):
        raise ValueError(f"--rounds {args.rounds} must be between 1 and the {len(items)} prompts of {args.prompts}")
    from graft_jax import methods
    from graft_jax.calibration import write_calibration
    from graft_jax.engine import SpeculativeDecoder
    from graft_jax.gate_choice import choose
    from graft_jax.session import Request
    from graft_jax.tree.gates import OPEN
    from graft_jax.warmup import record, round_seconds

    if "eagle3" not in methods.get(args.method).heads or not args.prune:
        raise ValueError(f"--method {args.method} {'' if args.prune else '--no-prune '}has no gates to calibrate")
    given = arguments.decoder(args)
    with console.status("loading the model"):
        decoder = SpeculativeDecoder.from_pretrained(**given)
        beam = methods.beam_of(decoder.spec.drafter)
        depths = tuple(range(beam.depth)) if args.gates is None else args.gates
        if not depths:
            raise ValueError("--gates '' leaves nothing to calibrate")
        options = {name: value for name, value in given.items() if name in methods.OPTION_NAMES}
        decoder = decoder.with_method(args.method, **{**options, "gates": depths, "thresholds": (OPEN,) * len(depths)})
    encoding = arguments.template(args)
    prompts = [
        encode_prompt(item.get("messages") or item["turns"][0], decoder.tokenizer, decoder.config, **encoding)
        for item in items[: args.rounds]
    ]
    request = Request(max_new_tokens=args.max_new_tokens, **arguments.sampling(args))
    with Progress(console=console) as progress:
        task = progress.add_task("warm-up rounds", total=len(prompts) * args.max_new_tokens)
        found = record(
            decoder, depths, prompts, request,
            lambda number, tokens: progress.update(task, completed=number * args.max_new_tokens + tokens),
        )  # fmt: skip
        progress.update(task, completed=len(prompts) * args.max_new_tokens)
        if args.save_memory:
            decoder.save_memory(args.save_memory)
        task = progress.add_task("timing rounds", total=(len(depths) + 1) * (TIMED_RUNS + 1))
        seconds = round_seconds(
            decoder, prompts[0], arguments.sampling(args), TIMED_RUNS, on_run=lambda: progress.advance(task)
        )
    chosen = choose(found, depths, seconds, args.min_auc)
    report = {
        "budget": decoder.spec.drafter.capacity,
        "draft_depth": beam.depth,
        "draft_top_k": beam.top_k,
        "gate_measure": args.gate_measure or "best",
        "gates": [depths[i] for i in chosen.gates],
        "thresholds": list(chosen.thresholds),
        "drafter": str(args.drafter),
        "warmup_rounds": len(prompts),
        "recorded_rounds": len(found.accepted),
        "depths": list(depths),
        "auc": [None if value != value else round(value, 4) for value in chosen.auc],
        "cut": list(chosen.cut),
        "lost_tokens": list(chosen.lost),
        "round_ms": [round(1e3 * float(value), 4) for value in seconds],
        "speed_gain": chosen.speed / chosen.open_speed,
        **provenance.of(decoder),
    }
    write_calibration(args.out, report)
    if args.json:
        print(json.dumps(report))
    else:
        console.print(_table(depths, chosen, seconds))
        gain = f"{chosen.speed:.1f} tokens/s over the recorded rounds, {chosen.open_speed:.1f} with no gate"
        console.print(f"{gain}; wrote {args.out}", markup=False, soft_wrap=True)
    return 0


def _table(depths: tuple[int, ...], chosen: Any, seconds: Any) -> Table:
    """Every gate that was recorded; those that stay have a threshold."""
    table = Table("depth", "AUC", "round, ms", "threshold", "ends rounds", "accepted tokens lost a round")
    for i, depth in enumerate(depths):
        row = [str(depth), f"{chosen.auc[i]:.2f}", f"{1e3 * seconds[i]:.2f}"]
        if i in chosen.gates:
            at = chosen.gates.index(i)
            row += [f"{chosen.thresholds[at]:.3f}", f"{chosen.cut[at]:.0%}", f"{chosen.lost[at]:.3f}"]
        table.add_row(*row, *[""] * (6 - len(row)))
    table.add_row("open", "", f"{1e3 * seconds[-1]:.2f}", "", "", "")
    return table
