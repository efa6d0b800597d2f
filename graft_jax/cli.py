"""The command line: `graft-jax generate | calibrate | prepare | train | fill | profile | plot | convert | info`."""

import argparse
import json
import os
import sys
import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

from graft_jax import arguments, cli_calibrate, cli_profile, cli_train, provenance, user_cache
from graft_jax.batch_file import run_file
from graft_jax.prompts import read_prompts

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 for a failure, 2 for bad usage or input."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    warnings.showwarning = lambda message, *rest: console.print(f"warning: {message}", style="yellow", markup=False)
    _use_compilation_cache()
    try:
        return args.run(args, console)
    except ValueError as error:
        console.print(f"graft-jax: {_line(error)}", style="red", markup=False, soft_wrap=True)
        return EXIT_USAGE
    except KeyboardInterrupt:
        console.print("graft-jax: interrupted", style="red")
        return EXIT_FAILURE
    except (OSError, RuntimeError, MemoryError, FloatingPointError) as error:
        console.print(f"graft-jax: {type(error).__name__}: {_line(error)}", style="red", markup=False)
        return EXIT_FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graft-jax", description="Lossless speculative decoding in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="continue a prompt", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt", nargs="?", help="the user's message (a plain text with --raw)")
    generate.add_argument("--prompt-ids", metavar="IDS", help="the prompt as token ids, e.g. 1,42,7")
    arguments.add_model(generate)
    arguments.add_method(generate, default="auto")
    generate.add_argument("--memory", metavar="FILE.npz", help="what the drafter learned before (calibrate "
                          "--save-memory)")  # fmt: skip
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    arguments.add_sampling(generate)
    generate.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    arguments.add_template(generate)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    generate.add_argument("--prompts", metavar="FILE.jsonl", help="a file of prompts instead of one")
    generate.add_argument("--out", metavar="FILE.jsonl", help="with --prompts: append results here; goes on"
                          " where an interrupted run ended")  # fmt: skip
    generate.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True,
                          help="print the text as it comes (not with --json)")  # fmt: skip
    generate.add_argument("--compare", action="store_true", help="run plain decoding too, and compare")
    generate.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")

    cli_calibrate.add(commands)

    convert = commands.add_parser("convert", help="write a checkpoint as a Hugging Face safetensors folder")
    convert.set_defaults(run=_convert)
    convert.add_argument("model", help="name, GGUF file, HF folder (safetensors or .bin) or hub id")
    convert.add_argument("out", nargs="?", help="folder to write; must not exist")
    convert.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    convert.add_argument("--dry-run", action="store_true", help="print the ledger of tensors, write nothing")
    convert.add_argument("--strict-config", action="store_true", help="unknown config keys are errors")

    cli_train.add(commands)
    cli_profile.add(commands)

    info = commands.add_parser("info", help="device, versions, caches, methods")
    info.set_defaults(run=_info)
    info.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    return parser


def _generate(args: argparse.Namespace, console: Console) -> int:
    if sum(given is not None for given in (args.prompt, args.prompt_ids, args.prompts)) != 1:
        raise ValueError("give one of PROMPT, --prompt-ids and --prompts")
    if args.out and not args.prompts:
        raise ValueError("--out goes with --prompts")
    prompt = args.prompt if args.prompt is not None else _ids(args.prompt_ids or "")
    items = read_prompts(args.prompts) if args.prompts else []
    from graft_jax.engine import SpeculativeDecoder

    with console.status("loading the model") as loading:
        decoder = SpeculativeDecoder.from_pretrained(**arguments.decoder(args), on_status=loading.update)
    _fill_memory(decoder, args.memory)
    settings: dict[str, Any] = dict(
        max_new_tokens=args.max_new_tokens, ignore_eos=args.ignore_eos, stop=args.stop,
        **arguments.sampling(args), **arguments.template(args),
    )  # fmt: skip
    if args.prompts:
        return run_file(decoder, items, settings, args.out, provenance.of(decoder), console)
    compiling = 0.0
    if args.compare:
        # What is compared is warm on both sides: a first run also pays for touching weights and code.
        with console.status("compiling and warming up (compiled programs are kept for the next time)"):
            warm = decoder.generate(prompt, **{**settings, "max_new_tokens": 2})
            compiling = warm.stats.compile_seconds
            _fill_memory(decoder, args.memory)
    if args.stream and not args.json:
        result = _print_stream(decoder, prompt, settings, console)
    else:
        with console.status("generating") as status:

            def on_progress(done: int) -> None:
                status.update(f"generating: {done} of {args.max_new_tokens} tokens")

            result = decoder.generate(prompt, on_progress=on_progress, **settings)
        if not args.json:
            print(result.text)
    comparison = None
    if args.compare and result.finish_reason != "interrupted":
        from graft_jax.compare import compare_with_plain

        with console.status("plain decoding, for comparison"):
            comparison = compare_with_plain(decoder, prompt, result, settings)
    if args.json:
        report = {"results": [result.to_json()], **provenance.of(decoder)}
        if comparison is not None:
            report["compare"] = comparison
        print(json.dumps(report))
    else:
        console.print(_summary(decoder, result, comparison, compiling + result.stats.compile_seconds))
    return EXIT_OK


def _fill_memory(decoder, path: str | None) -> None:
    decoder.reset_memory()
    if path:
        decoder.load_memory(path)


def _print_stream(decoder, prompt, settings, console: Console):
    result: Any = None  # the last chunk carries it
    status = console.status("compiling (kept for the next time)")
    status.start()
    try:
        for chunk in decoder.stream(prompt, **settings):
            status.stop()
            print(chunk.text, end="", flush=True)
            result = chunk.result
    finally:
        status.stop()
    print()
    return result


def _summary(decoder, result, comparison: dict[str, Any] | None, compiling: float) -> Table:
    stats = result.stats
    table = Table(show_header=False, title=f"{decoder.method} on {decoder.name}, {decoder.dtype}")
    table.add_row("new tokens", f"{stats.new_tokens} ({result.finish_reason})")
    table.add_row("time to first token", f"{stats.first_token_seconds:.2f} s (and {compiling:.1f} s compiling)")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f}")
    table.add_row("mean acceptance length", f"{stats.mean_acceptance_length:.2f} tokens a round")
    if comparison is not None:
        table.add_row("speedup over plain decoding", f"{comparison['speedup']:.2f}")
        table.add_row("same output as plain decoding", _verdict(comparison, decoder.dtype))
    return table


def _verdict(comparison: dict[str, Any], dtype: str) -> str:
    if comparison["equal"]:
        return "yes"
    near = f"differs at token {comparison['first_difference']}, margin {comparison['margin']:.2g}"
    return f"{near} (rounding: use --dtype float32 for exact equality)" if dtype != "float32" else near


def _info(args: argparse.Namespace, console: Console) -> int:
    from graft_jax.io.hub import PACKAGED, resolve
    from graft_jax.methods import METHODS

    models = {}
    for name in PACKAGED:
        try:
            models[name] = str(resolve(name))
        except ValueError as error:
            models[name] = _line(error)
    report = {
        "device": provenance.device(),
        "versions": provenance.versions(),
        "compilation_cache": _compilation_cache(),
        "models": models,
        "methods": {name: {"summary": m.summary, "needs": m.needs, "from": m.paper} for name, m in METHODS.items()},
    }
    if args.json:
        print(json.dumps(report))
        return EXIT_OK
    out = Console()
    for key in ("device", "compilation_cache"):
        out.print(f"{key}: {report[key]}", markup=False, soft_wrap=True)
    out.print("versions: " + ", ".join(f"{k} {v}" for k, v in report["versions"].items()), soft_wrap=True)
    for name, where in models.items():
        out.print(f"model {name}: {where}", markup=False, soft_wrap=True)
    table = Table("method", "what it drafts", "needs", "from")
    for name, m in METHODS.items():
        table.add_row(name, m.summary, m.needs, m.paper)
    out.print(table)
    return EXIT_OK


def _convert(args: argparse.Namespace, console: Console) -> int:
    from graft_jax.io.checkpoint import check_dtype, open_checkpoint, save_hf

    check_dtype(args.dtype)
    checkpoint = open_checkpoint(args.model, strict_config=args.strict_config)
    table = Table("tensor", "stored as", "shape", "parameter")
    for name, kind, shape, path in checkpoint.ledger():
        table.add_row(name, kind, " x ".join(map(str, shape)), path)
    if args.dry_run:
        Console(width=160).print(table)
        console.print(f"{len(checkpoint.pairs)} tensors, each used once; nothing was written")
        return EXIT_OK
    if args.out is None:
        raise ValueError("give the folder to write, or --dry-run")
    with console.status(f"converting to {args.dtype}"):
        params = checkpoint.load(args.dtype)
        save_hf(args.out, checkpoint.config, params, checkpoint.tokenizer)
    console.print(f"wrote {args.out}: {len(checkpoint.pairs)} tensors, {args.dtype}", markup=False)
    return EXIT_OK


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} must be whole numbers, e.g. 1,42,7") from None


def _compilation_cache() -> str:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, or a folder of ours in the user's cache."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(user_cache.folder() / "xla")


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs: a second run starts in seconds."""
    import jax

    jax.config.update("jax_compilation_cache_dir", _compilation_cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
