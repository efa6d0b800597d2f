"""`graft-jax profile`: how much every way of using a kit accepts, for method "auto" to choose from."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from graft_jax import arguments, provenance

BUDGETS = (3, 7, 15)


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "profile",
        help="measure what a kit's drafters accept, for --method auto",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("kit", metavar="KIT", help="folder with draft heads in folders of their own and/or table.npz")
    parser.add_argument("--data", metavar="FOLDER", required=True, help="of `graft-jax prepare`: its held-out texts are"
                        " answered")  # fmt: skip
    arguments.add_model(parser)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="those to measure; all that it can be used with if"
                        " none")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=24, metavar="N", help="held-out prompts, at most")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="a prompt")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, metavar="K", help="tree nodes to try")
    parser.add_argument("--json", action="store_true", help="the record on stdout, nothing else there")


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs the command."""
    from graft_jax import kit, methods
    from graft_jax.engine import SpeculativeDecoder
    from graft_jax.io.block_drafter import load_drafter
    from graft_jax.training import shards
    from graft_jax.training.evaluate import acceptance, held_out_prompts

    folder = Path(args.kit)
    if not folder.is_dir():
        raise ValueError(f"{args.kit}: no such folder")
    wanted = kit.variants(folder, args.budgets)
    for name in args.methods or ():
        if name not in {method for method, _ in wanted}:
            raise ValueError(f"--methods {name}: {methods.get(name).needs} is needed, and {folder} has none")
    wanted = [way for way in wanted if args.methods is None or way[0] in args.methods]
    prompts = held_out_prompts(shards.read(Path(args.data), "held_out"), args.prompts)
    if not prompts:
        raise ValueError(f"--data {args.data} holds no held-out prompts; see `graft-jax prepare --held-out`")
    loading = dict(model=args.model, dtype=args.dtype, max_length=args.max_length, strict_config=args.strict_config)
    with console.status("loading the model"):
        plain = SpeculativeDecoder.from_pretrained(**loading, method="ar", drafter=folder)
        heads = {
            kind: load_drafter(
                path, plain.config, dtype=args.dtype, kinds=(kind,), target_embed=plain.params.target.embed
            )
            for kind, path in kit.heads(folder).items()
        }  # fmt: skip
    candidates = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(wanted) * len(prompts))
        for method, options in wanted:
            progress.update(task, description=f"{method} {options['budget']}")
            kind = next((kind for kind in methods.get(method).heads if kind in heads), None)
            try:
                made = (
                    plain.with_method(method, **options)
                    if kind is None
                    else plain.with_drafter(method, *heads[kind], **options)
                )
            except ValueError as error:  # a chain is no longer than its drafter's block, say
                console.print(f"left out: {method}: {error}", markup=False, soft_wrap=True)
                progress.advance(task, len(prompts))
                continue
            length = acceptance(made, prompts, args.max_new_tokens, lambda: progress.advance(task))
            candidates.append(kit.Candidate(method, options, round(length, 4)))
    candidates.sort(key=lambda candidate: -candidate.acceptance)
    facts = {"prompts": len(prompts), "new_tokens": args.max_new_tokens, "temperature": 0.0, **provenance.of(plain)}
    del facts["method"]
    kit.write_record(folder, candidates, prompts[0], facts)
    if args.json:
        print((folder / kit.RECORD).read_text(), end="")
        return 0
    table = Table("method", "nodes", "options", "tokens a round")
    for candidate in candidates:
        rest = {key: value for key, value in candidate.options.items() if key != "budget"}
        table.add_row(
            candidate.method, str(candidate.budget), json.dumps(rest) if rest else "", f"{candidate.acceptance:.2f}"
        )
    console.print(table)
    console.print(f"wrote {folder / kit.RECORD}", markup=False, soft_wrap=True)
    return 0
