"""`graft-jax prepare`, `train`, `fill` and `plot`."""

import argparse
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console


def add(commands: Any) -> None:
    """Adds the commands' parsers."""
    prepare = commands.add_parser(
        "prepare", help="make training data", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    prepare.set_defaults(run=_prepare)
    prepare.add_argument("data", nargs="*", help="JSON lines (`messages`, `conversations`, `text`, or `prompt_ids` with"
                         " `response_ids`) or .txt files; may be gzipped")  # fmt: skip
    prepare.add_argument("--out", required=True, metavar="FOLDER", help="folder to write; must not exist")
    prepare.add_argument("--model", default="smollm2-135m", help="the target: name, GGUF file, HF folder or hub id")
    prepare.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a packed row")
    prepare.add_argument("--held-out", type=float, default=0.02, metavar="SHARE", help="kept for evaluation")
    prepare.add_argument("--seed", type=int, default=0, help="of the order")
    prepare.add_argument("--self-instruct", type=int, default=0, metavar="N", help="the target writes N conversations")
    prepare.add_argument("--topics", metavar="FILE", help="beginnings of users' turns for --self-instruct, one a line")
    prepare.add_argument("--regenerate", action="store_true", help="the target answers the data's last user turns anew")
    prepare.add_argument("--batch", type=int, default=48, metavar="N", help="conversations written at a time")
    prepare.add_argument("--answer-tokens", type=int, default=384, metavar="N", help="longest written answer")
    prepare.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7], metavar="T",
                         help="of written answers, batch by batch")  # fmt: skip
    prepare.add_argument("--minutes", type=float, metavar="M", help="for writing; then with what there is")
    prepare.add_argument("--dtype", default="bfloat16", help="of the target that writes: bfloat16 or float32")
    prepare.add_argument("--keep-loops", action="store_true", help="keep texts that repeat themselves")
    prepare.add_argument("--on-bad-line", default="refuse", choices=("refuse", "skip"))

    train = commands.add_parser("train", help="train a drafter", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    train.set_defaults(run=_train)
    train.add_argument("config", metavar="RUN.yaml", help="see configs/runs")
    train.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                       help="another value, e.g. steps=100 or drafter.ttt_steps=4")  # fmt: skip
    train.add_argument("--print-config", action="store_true", help="print the run's settings and stop")

    fill = commands.add_parser(
        "fill", help="fill a retrieval table from prepared data", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    fill.set_defaults(run=_fill)
    fill.add_argument("data", metavar="FOLDER", help="what `graft-jax prepare` wrote")
    fill.add_argument("--out", required=True, metavar="FILE.npz", help="for --table")
    fill.add_argument("--model", default="smollm2-135m", help="the target: name, GGUF file, HF folder or hub id")
    fill.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    fill.add_argument("--order", type=int, default=3, help="longest context, in tokens")
    fill.add_argument("--width", type=int, default=8, help="successors kept a context")
    fill.add_argument("--log2-rows", type=int, default=17, metavar="N", help="2**N rows for contexts of several tokens")
    fill.add_argument("--features", metavar="FOLDER", help="cached features of a run on the same data, if there are")
    fill.add_argument("--taps", type=int, nargs="*", help="with --features: the run's taps; EAGLE-3's if none")
    fill.add_argument("--batch-rows", type=int, default=8, metavar="N")
    fill.add_argument("--rows", type=int, metavar="N", help="use the first N rows of the data, not all")

    plot = commands.add_parser("plot", help="plot loss and acceptance of training runs against tokens")
    plot.set_defaults(run=_plot)
    plot.add_argument("runs", nargs="+", metavar="FOLDER", help="folders of runs")
    plot.add_argument("--out", default="training.png", metavar="FILE.png")


def _prepare(args: argparse.Namespace, console: Console) -> int:
    from graft_jax.io.checkpoint import open_checkpoint
    from graft_jax.training import data, shards

    if args.length < 8:
        raise ValueError(f"--length {args.length} must be at least 8 tokens")
    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held-out {args.held_out} must be at least 0 and below 1")
    if args.minutes is not None and not args.minutes > 0:
        raise ValueError(f"--minutes {args.minutes} must be above 0")
    if not args.data and not args.self_instruct:
        raise ValueError("give data, or --self-instruct N")
    checkpoint = open_checkpoint(args.model)
    sources = _written(args, console) if args.self_instruct or args.regenerate else list(args.data)
    skipped: list[str] = []

    def report(message: str) -> None:
        skipped.append(message)
        console.print(f"skipped {message}", style="yellow", markup=False, soft_wrap=True)

    def documents():
        for path in sources:
            yield from data.read_documents(
                path, checkpoint.tokenizer, checkpoint.config, on_bad_line=args.on_bad_line, report=report
            )

    with console.status("reading and encoding"):
        kept, counts = data.select(documents(), keep_loops=args.keep_loops)
    if not kept:
        raise ValueError(f"no text is left of {', '.join(map(str, sources))}: {counts}, {len(skipped)} bad lines")
    apart = [d for d in kept if data.held_out(d, args.held_out)]
    trained = [d for d in kept if not data.held_out(d, args.held_out)]
    if not trained:
        raise ValueError("all texts were held out; give more, or --held-out 0")
    with console.status("packing"):
        rows, cut = shards.pack(trained, args.length, args.seed)
        evaluation, _ = shards.pack(apart, args.length, args.seed)
        facts = {
            "model": args.model, "length": args.length, "seed": args.seed, "held_out": args.held_out,
            "sources": [Path(path).name for path in sources], **counts, "bad_lines": len(skipped), "tokens_cut": cut,
        }  # fmt: skip
        manifest = shards.write(args.out, {"train": rows, "held_out": evaluation}, facts)
    split = manifest["splits"]["train"]
    console.print(
        f"wrote {args.out}: {split['texts']} texts, {split['tokens']} tokens ({split['trained_tokens']} trained on), "
        f"{split['rows']} rows, {split['tokens'] / (split['rows'] * args.length):.0%} full; "
        f"{len(apart)} texts held out; {counts['duplicates']} duplicates and {counts['loops']} loops left out",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def _written(args: argparse.Namespace, console: Console) -> list[Any]:
    """Files of what the target wrote, and of the data that it did not answer anew."""
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    from graft_jax.engine import SpeculativeDecoder
    from graft_jax.training import data, self_write

    until = math.inf if args.minutes is None else time.perf_counter() + 60 * args.minutes
    settings = self_write.Settings(
        batch=args.batch, answer_tokens=args.answer_tokens, temperatures=tuple(args.temperatures), seed=args.seed
    )
    topics = self_write.read_topics(args.topics) if args.topics else []
    # Room for the prompt: a written turn with its header, or what a row holds.
    length = settings.answer_tokens + (args.length if args.regenerate else settings.turn_tokens + 128)
    decoder = SpeculativeDecoder.from_pretrained(args.model, method="ar", dtype=args.dtype, max_length=length)
    base, jobs = Path(args.out), {}
    if args.self_instruct:
        count = args.self_instruct
        jobs["self"] = (count, lambda start: self_write.self_instruct(decoder, count, topics, settings, start))
    if args.regenerate:
        talks = [talk for path in args.data for talk in data.read_conversations(path, on_bad_line=args.on_bad_line)]
        jobs["answers"] = (len(talks), lambda start: self_write.regenerate(decoder, talks, settings, start))
    files: list[Any] = [] if args.regenerate else list(args.data)
    for name, (count, batches) in jobs.items():
        path = base.with_name(f"{base.name}.{name}.jsonl")
        columns = (*Progress.get_default_columns()[:2], TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("writing", total=-(-count // settings.batch))
            began, before = time.perf_counter(), None

            def on_batch(done: int, tokens: int, progress=progress, task=task, began=began) -> None:
                nonlocal before
                before = tokens if before is None else before
                speed = (tokens - before) / (time.perf_counter() - began)
                progress.update(task, completed=done, description=f"{tokens} tokens written, {speed:.0f} a second")

            self_write.write_all(path, batches, on_batch, until)
        files.append(path)
    return files


def _train(args: argparse.Namespace, console: Console) -> int:
    from graft_jax.training.run import read_run

    overrides = {}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair!r} must be NAME=VALUE")
        overrides[name] = yaml.safe_load(value)
    run = read_run(args.config, overrides)
    if args.print_config:
        console.print(run, markup=False)
        return 0
    from graft_jax.training.loop import train

    found = train(run, console)
    shown = ", ".join(f"{name} {value}" for name, value in found.items())
    console.print(f"wrote {run.folder / 'drafter'}; {shown}", markup=False, soft_wrap=True)
    return 0


def _fill(args: argparse.Namespace, console: Console) -> int:
    from rich.progress import Progress

    from graft_jax.io.checkpoint import load_target
    from graft_jax.models.eagle3_config import default_taps
    from graft_jax.retrieval import stored
    from graft_jax.retrieval.adjacency import SuccessorTable
    from graft_jax.training import feature_cache, fill_table, shards

    rows = shards.read(args.data, "train")
    if not len(rows):
        raise ValueError(f"data={args.data!r}: holds nothing to fill a table from")
    if args.rows is not None:
        if args.rows < 1 or args.features:
            raise ValueError(f"--rows {args.rows} must be at least 1, and goes without --features")
        rows = shards.Rows(*(getattr(rows, field.name)[: args.rows] for field in dataclasses.fields(rows)))
    config, params, _ = load_target(args.model, dtype=args.dtype)
    table = SuccessorTable(config.vocab_size, args.order, args.width, args.log2_rows)
    taps = tuple(args.taps or default_taps(config.num_layers)) if args.features else ()
    facts = feature_cache.facts(config, params, shards.read_manifest(args.data)) if args.features else {}
    source = feature_cache.FeatureSource(config, params, taps, rows, args.features, facts)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the target's choices", total=len(rows))
        seen = fill_table.observe(
            config, params, source, table, args.batch_rows, lambda done: progress.update(task, completed=done)
        )
    levels = stored.fill(table, seen)
    stored.save(args.out, table, levels, {"model": args.model, "tokens": len(seen.contexts)})
    held = fill_table.held(levels)
    size = Path(args.out).stat().st_size
    console.print(
        f"wrote {args.out}: {size / 1e6:.1f} MB, from {len(seen.contexts)} tokens; "
        f"contexts of 1, 2, ... tokens: {held}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return 0


def _plot(args: argparse.Namespace, console: Console) -> int:
    from graft_jax.training.plot import plot

    plot(args.runs, args.out)
    console.print(f"wrote {args.out}", markup=False)
    return 0
