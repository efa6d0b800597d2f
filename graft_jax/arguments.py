"""Arguments that several commands share, and what they are called in Python."""

import argparse
import json
from typing import Any


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="name, GGUF file, HF folder or hub id")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--max-length", type=int, default=2048, metavar="N", help="prompt and new tokens")
    parser.add_argument("--strict-config", action="store_true", help="unknown config keys are errors")


def add_method(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--method", default=default, help="drafting method; see `graft-jax info`")
    parser.add_argument("--budget", type=int, help="tree nodes to verify a round, beside the root")
    parser.add_argument("--table-order", type=int, default=3, help="longest retrieval context, in tokens")
    parser.add_argument("--table", default="auto", metavar="FILE", help="retrieval table to start with, of `graft-jax"
                        " fill`: auto takes the packaged model's own, none starts empty")  # fmt: skip
    parser.add_argument("--template", help="retrieval template: narrow, graft or recycling; the method's if none")
    parser.add_argument("--kernels", metavar="NAME", help="implementation of the kernels, e.g. xla; the platform's"
                        " own if none")  # fmt: skip
    parser.add_argument("--drafter", metavar="PATH", help="draft head: HF folder or hub id; see the methods'"
                        " needs in `graft-jax info`")  # fmt: skip
    parser.add_argument("--draft-rope", default="auto", metavar="BASE", help="the head's rotary base: auto, config"
                          " or a number (many heads were trained with 10000 whatever their config says)")  # fmt: skip
    parser.add_argument("--calibration", metavar="FILE.json", help="gates, thresholds and tree sizes")
    parser.add_argument("--block-size", type=int, metavar="T", help="slots of a block drafter's block, its own at most")
    parser.add_argument("--candidates", type=int, metavar="M", help="tokens a slot that Domino's head corrects; 0 for"
                          " all (domino: 0, dominotree: 64 if not given)")  # fmt: skip
    parser.add_argument("--scoring", help="of dominotree's nodes: path (if not given), greedy-path or marginal")
    parser.add_argument("--normaliser", help="Domino's probabilities sum over the candidates (slice, if not given)"
                          " or the vocabulary (full)")  # fmt: skip
    parser.add_argument("--draft-depth", type=int, metavar="D", help="expansions of the draft tree")
    parser.add_argument("--draft-top-k", type=int, metavar="K", help="beam of the draft tree")
    parser.add_argument("--gates", type=_numbers(int), metavar="DEPTHS", help="where drafting may stop, e.g. 0,1,5;"
                          " '' for nowhere")  # fmt: skip
    parser.add_argument("--thresholds", type=_numbers(float), metavar="P", help="one a gate, e.g. 0.14,0.13,0.49;"
                          " for graft-dflash and graft-dominotree what a kept path needs")  # fmt: skip
    parser.add_argument("--gate-measure", metavar="NAME", help="confidence at a gate: best (path) or beam (sum)")
    parser.add_argument("--prune", action=argparse.BooleanOptionalAction, default=True,
                          help="stop drafting at closed gates (graft)")  # fmt: skip
    parser.add_argument("--retrieval", action=argparse.BooleanOptionalAction, default=True,
                          help="fill freed slots with retrieved tokens (the graft methods)")  # fmt: skip
    parser.add_argument("--attach", help="where retrieved tokens hang: root, tail or ends; the method's if none")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all tokens")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 keeps all tokens")
    parser.add_argument("--seed", type=int, default=0)


def add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--template-arg", action="append", default=[], metavar="NAME=VALUE",
                          help="variable of the chat template, e.g. enable_thinking=false")  # fmt: skip


def decoder(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `from_pretrained`. Settings of the method that were not given leave room for a calibration's."""
    options = {name: getattr(args, name) for name in (
        "budget", "table_order", "kernels", "template", "draft_depth", "draft_top_k", "gates", "gate_measure",
        "thresholds", "prune", "retrieval", "attach", "block_size", "candidates", "scoring", "normaliser",
    )}  # fmt: skip
    loading: dict[str, Any] = {name: getattr(args, name) for name in (
        "model", "method", "dtype", "max_length", "strict_config", "drafter", "draft_rope", "calibration",
    )}  # fmt: skip
    loading["table"] = None if args.table == "none" else args.table
    return loading | {name: value for name, value in options.items() if value is not None}


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `generate` that choose tokens."""
    return {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}


def template(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `generate` that turn prompts into tokens."""
    return {"system": args.system, "raw": args.raw, "template_args": _template_args(args.template_arg)}


def _numbers(kind: type) -> Any:
    """An argument of numbers with commas between them."""

    def parse(text: str) -> tuple:
        return tuple(kind(part) for part in text.split(",") if part)

    parse.__name__ = f"list of {kind.__name__}s"  # argparse names it in its message
    return parse


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
