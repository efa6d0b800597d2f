"""A file of prompts in, a file of results out, resumable."""

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from graft_jax.engine import SpeculativeDecoder


def run_file(
    decoder: SpeculativeDecoder,
    items: list[dict[str, Any]],
    settings: dict[str, Any],
    out: str | None,
    provenance: dict[str, Any],
    console: Console,
) -> int:
    """Answers every prompt and writes one JSON line each, as soon as it is done.

    A prompt that cannot be answered (too long, say) gets a line with "error" and the others go on. A line holds
    "line" (of the prompts file), "question_id" if there is one, "results" (one a turn), and the provenance.

    Args:
        items: from `prompts.read_prompts`.
        settings: arguments of `generate`.
        out: file to append to, None for stdout. Prompts whose lines stand there already are skipped; a last
            line that was cut off is removed.

    Returns:
        Exit status: 0, or 1 if a prompt failed or the run was interrupted.
    """
    done = _finished_lines(out) if out else set()
    todo = [item for item in items if item["line"] not in done]
    if done:
        console.print(
            f"{out}: {len(items) - len(todo)} of {len(items)} prompts are done already", markup=False, soft_wrap=True
        )
    failed = 0
    with Progress(console=console) as progress:
        task = progress.add_task("prompts", total=len(todo))
        for item in todo:
            record = {key: item[key] for key in ("line", "question_id") if key in item}
            try:
                results = _answer(decoder, item, settings)
            except ValueError as error:
                record["error"] = str(error)
                console.print(f"line {item['line']}: {error}", style="yellow", markup=False, soft_wrap=True)
                failed += 1
            else:
                if results[-1].finish_reason == "interrupted":
                    console.print("interrupted; run the same command again to go on")
                    return 1
                record["results"] = [result.to_json() for result in results]
            _write(out, json.dumps({**record, **provenance}))
            progress.advance(task)
    return 1 if failed else 0


def _answer(decoder: SpeculativeDecoder, item: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    if "messages" in item:
        return [decoder.generate(item["messages"], **{**settings, "system": None})]
    turns = item["turns"]
    if len(turns) == 1:
        return [decoder.generate(turns[0], **settings)]
    if settings.get("raw") or decoder.tokenizer is None or not decoder.tokenizer.has_chat_template:
        raise ValueError("several turns need a chat template (and not raw)")
    system = settings.get("system")
    messages = [{"role": "system", "content": system}] if system is not None else []
    results = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        results.append(decoder.generate(messages, **{**settings, "system": None}))
        messages.append({"role": "assistant", "content": results[-1].text})
        if results[-1].finish_reason == "interrupted":
            break
    return results


def _finished_lines(out: str) -> set[int]:
    """Line numbers of the prompts that `out` holds results of; a torn last line is cut off the file."""
    path = Path(out)
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    finished = set()
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            finished.add(int(json.loads(line)["line"]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{out}:{number}: is not a line of results; name another file with --out") from None
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return finished


def _write(out: str | None, line: str) -> None:
    if out is None:
        print(line, flush=True)
        return
    with open(out, "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
