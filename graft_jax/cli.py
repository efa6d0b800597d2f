"""The command line: `graft-jax generate | convert | info`."""

import argparse
import json
import os
import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graft_jax.batch_file import run_file
from graft_jax.prompts import read_prompts

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2
PACKAGES = ("graft_jax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


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
    except (OSError, RuntimeError, MemoryError) as error:
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
    generate.add_argument("--model", default="smollm2-135m", help="name, GGUF file, HF folder or hub id")
    generate.add_argument("--method", default="recycling", help="drafting method; see `graft-jax info`")
    generate.add_argument("--budget", type=int, help="tree nodes to verify a round, beside the root")
    generate.add_argument("--table-order", type=int, default=3, help="longest retrieval context, in tokens")
    generate.add_argument("--template", help="retrieval template: narrow, graft or recycling; the method's if none")
    generate.add_argument("--drafter", metavar="PATH", help="draft head: HF folder or hub id (eagle3, graft)")
    generate.add_argument("--draft-rope", default="auto", metavar="BASE", help="the head's rotary base: auto, config"
                          " or a number (many heads were trained with 10000 whatever their config says)")  # fmt: skip
    generate.add_argument("--calibration", metavar="FILE.json", help="gates, thresholds and tree sizes")
    generate.add_argument("--draft-depth", type=int, metavar="D", help="expansions of the draft tree")
    generate.add_argument("--draft-top-k", type=int, metavar="K", help="beam of the draft tree")
    generate.add_argument("--gates", type=_numbers(int), metavar="DEPTHS", help="where drafting may stop, e.g. 0,1,5;"
                          " '' for nowhere")  # fmt: skip
    generate.add_argument("--thresholds", type=_numbers(float), metavar="P", help="one a gate, e.g. 0.14,0.13,0.49")
    generate.add_argument("--gate-measure", default="best", help="confidence at a gate: best (path) or beam (sum)")
    generate.add_argument("--prune", action=argparse.BooleanOptionalAction, default=True,
                          help="stop drafting at closed gates (graft)")  # fmt: skip
    generate.add_argument("--retrieval", action=argparse.BooleanOptionalAction, default=True,
                          help="fill freed slots with retrieved tokens (graft)")  # fmt: skip
    generate.add_argument("--attach", default="root", help="where retrieved tokens hang: root, tail or ends (graft)")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all tokens")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all tokens")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 keeps all tokens")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    generate.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    generate.add_argument("--max-length", type=int, default=2048, metavar="N", help="prompt and new tokens")
    generate.add_argument("--system", help="system message")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    generate.add_argument("--template-arg", action="append", default=[], metavar="NAME=VALUE",
                          help="variable of the chat template, e.g. enable_thinking=false")  # fmt: skip
    generate.add_argument("--prompts", metavar="FILE.jsonl", help="a file of prompts instead of one")
    generate.add_argument("--out", metavar="FILE.jsonl", help="with --prompts: append results here; goes on"
                          " where an interrupted run ended")  # fmt: skip
    generate.add_argument("--strict-config", action="store_true", help="unknown config keys are errors")
    generate.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True,
                          help="print the text as it comes (not with --json)")  # fmt: skip
    generate.add_argument("--compare", action="store_true", help="run plain decoding too, and compare")
    generate.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")

    convert = commands.add_parser("convert", help="write a checkpoint as a Hugging Face safetensors folder")
    convert.set_defaults(run=_convert)
    convert.add_argument("model", help="name, GGUF file, HF folder (safetensors or .bin) or hub id")
    convert.add_argument("out", nargs="?", help="folder to write; must not exist")
    convert.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    convert.add_argument("--dry-run", action="store_true", help="print the ledger of tensors, write nothing")
    convert.add_argument("--strict-config", action="store_true", help="unknown config keys are errors")

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

    with console.status("loading the model"):
        decoder = SpeculativeDecoder.from_pretrained(
            args.model, method=args.method, dtype=args.dtype, max_length=args.max_length,
            strict_config=args.strict_config, drafter=args.drafter, draft_rope=args.draft_rope,
            calibration=args.calibration, **_options(args),
        )  # fmt: skip
    settings: dict[str, Any] = dict(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        min_p=args.min_p, seed=args.seed, ignore_eos=args.ignore_eos, stop=args.stop, system=args.system,
        raw=args.raw, template_args=_template_args(args.template_arg),
    )  # fmt: skip
    if args.prompts:
        return run_file(decoder, items, settings, args.out, _provenance(decoder), console)
    compiling = 0.0
    if args.compare:
        # What is compared is warm on both sides: a first run also pays for touching weights and code.
        with console.status("compiling and warming up (compiled programs are kept for the next time)"):
            warm = decoder.generate(prompt, **{**settings, "max_new_tokens": 2})
            compiling = warm.stats.compile_seconds
            decoder.reset_memory()
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
        report = {"results": [result.to_json()], **_provenance(decoder)}
        if comparison is not None:
            report["compare"] = comparison
        print(json.dumps(report))
    else:
        console.print(_summary(decoder, result, comparison, compiling + result.stats.compile_seconds))
    return EXIT_OK


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the method that were given; those that were not leave room for a calibration's."""
    given = {name: getattr(args, name) for name in (
        "budget", "table_order", "template", "draft_depth", "draft_top_k", "gates", "thresholds", "prune",
        "retrieval", "attach",
    )}  # fmt: skip
    if args.gate_measure != "best":
        given["gate_measure"] = args.gate_measure
    return {name: value for name, value in given.items() if value is not None}


def _numbers(kind: type) -> Any:
    """An argument of numbers with commas between them."""

    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(",") if part)

    parse.__name__ = f"list of {kind.__name__}s"  # argparse names it in its message
    return parse


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
        "device": _device(),
        "versions": _versions(),
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


def _template_args(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is JSON (false, 3, "x") is taken as such, else as text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name.isidentifier() or not equals:
            raise ValueError(f"--template-arg {pair!r} must be NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


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


def _provenance(decoder) -> dict[str, Any]:
    return {
        "method": decoder.method,
        "model": decoder.name,
        "dtype": decoder.dtype,
        "device": _device(),
        "versions": _versions(),
    }


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind} x {jax.device_count()}, {os.cpu_count()} CPU cores"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _compilation_cache() -> str:
    """Where compiled programs are kept: JAX_COMPILATION_CACHE_DIR, or a folder of ours in the user's cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(home / "graft_jax" / "xla")


def _use_compilation_cache() -> None:
    """Keeps compiled programs between runs: a second run starts in seconds."""
    import jax

    jax.config.update("jax_compilation_cache_dir", _compilation_cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
