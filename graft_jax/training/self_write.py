"""Data from the target alone: it writes the user's turn too, or answers given turns anew."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft_jax.bench.datasets import loops
from graft_jax.engine import SpeculativeDecoder
from graft_jax.tokenizer import Tokenizer

_MARK = "\u241f"  # a character that no template writes
MIN_TURN = 4  # tokens of a user's turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are written.

    Attributes:
        batch: conversations written at a time.
        turn_tokens, answer_tokens: most new tokens of a user's turn and of an answer.
        temperatures: of the answers, one batch after the other; users' turns are written at 1.
        seed: of all of it.
    """

    batch: int = 48
    turn_tokens: int = 64
    answer_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 0


def user_header(tokenizer: Tokenizer) -> list[int]:
    """What stands before the user's words in the first turn.

    Raises:
        ValueError: the chat template hides where they begin.
    """
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    header, mark, _ = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's words as they are")
    return tokenizer.encode(header, add_special_tokens=False)


def read_topics(path: str | Path) -> list[str]:
    """Beginnings of users' turns, one a line; # starts a comment.

    Raises:
        ValueError: the file is missing or holds none.
    """
    if not Path(path).is_file():
        raise ValueError(f"topics={str(path)!r}: no such file")
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"topics={str(path)!r}: holds no lines")
    return found


def self_instruct(
    decoder: SpeculativeDecoder, count: int, topics: Sequence[str], settings: Settings, start: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """Batches of conversations that the target writes by itself.

    Every batch depends on its number and the seed alone, so a stopped run goes on where it was.

    Args:
        decoder: plain decoding of the target.
        count: conversations to write in all; fewer come back, for turns that do not end and texts that loop go.
        topics: beginnings of users' turns, in turn; the target chooses freely if there are none.
        start: batches written before.

    Yields:
        Objects with `prompt_ids`, `response_ids` and `temperature`.
    """
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError("self-instruction needs a model with a tokenizer and a chat template")
    header = user_header(tokenizer)
    for number in range(start, -(-count // settings.batch)):
        size = min(settings.batch, count - number * settings.batch)
        beginnings = [topics[(number * settings.batch + i) % len(topics)] if topics else "" for i in range(size)]
        prompts = [header + (tokenizer.encode(text, add_special_tokens=False) if text else []) for text in beginnings]
        outs = _continue(decoder, prompts, settings.turn_tokens, 1.0, settings, number, 0)
        turns = []
        for text, out in zip(beginnings, outs):
            ids = out.token_ids[:-1]
            if out.finish_reason == "stop" and len(ids) >= (1 if text else MIN_TURN) and not loops(ids):
                written = tokenizer.decode(ids)
                turns.append([{"role": "user", "content": (text + written).strip()}])
        yield _answered(decoder, turns, settings, number)


def regenerate(
    decoder: SpeculativeDecoder, conversations: Sequence[Sequence[dict[str, str]]], settings: Settings, start: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """Batches of conversations whose last answer the target writes anew; what comes before it is kept.

    Arguments and yields as for `self_instruct`.
    """
    for number in range(start, -(-len(conversations) // settings.batch)):
        batch = conversations[number * settings.batch : (number + 1) * settings.batch]
        turns = []
        for messages in batch:
            asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if asked:
                turns.append(list(messages[: asked[-1] + 1]))
        yield _answered(decoder, turns, settings, number)


def _answered(decoder, turns, settings: Settings, number: int) -> list[dict[str, Any]]:
    """Answers to conversations that end with the user; those that loop are left out."""
    if not turns:
        return []
    temperature = settings.temperatures[number % len(settings.temperatures)]
    prompts = [decoder.tokenizer.apply_chat_template(messages) for messages in turns]
    room = decoder.spec.max_length - settings.answer_tokens
    prompts = [ids for ids in prompts if len(ids) <= room]
    outs = _continue(decoder, prompts, settings.answer_tokens, temperature, settings, number, 1) if prompts else []
    return [
        {"prompt_ids": prompt, "response_ids": out.token_ids, "temperature": temperature}
        for prompt, out in zip(prompts, outs)
        if len(out.token_ids) > 1 and not loops(out.token_ids)
    ]


def _continue(decoder, prompts, new_tokens: int, temperature: float, settings: Settings, number: int, part: int):
    seeds = np.random.default_rng([settings.seed, number, part]).integers(0, 2**32, settings.batch).tolist()
    # One batch size: fewer prompts are filled up, so that nothing compiles anew.
    padded = [*prompts, *([prompts[0]] * (settings.batch - len(prompts)))]
    outs = decoder.generate(padded, max_new_tokens=new_tokens, temperature=temperature, seed=seeds)
    return outs[: len(prompts)]


def write_all(
    path: str | Path,
    batches: Callable[[int], Iterator[list[dict[str, Any]]]],
    on_batch: Callable[[int, int], None],
    until: float = math.inf,
) -> None:
    """Appends batches to a file of JSON lines; goes on after the last whole batch of an earlier run.

    How far it came stands in a file beside it.

    Args:
        batches: from the number of a batch on.
        on_batch: is called with batches and answer tokens so far.
        until: no batch is begun that would not end by then (`time.perf_counter`), going by the one before; the first
            one is in any case.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    progress = path.with_suffix(".progress.json")
    done = {"batches": 0, "bytes": 0, "tokens": 0}
    if progress.is_file() and path.is_file():
        done = json.loads(progress.read_text())
    with open(path, "a+b") as file:
        file.truncate(done["bytes"])
        clock = time.perf_counter()
        for batch in batches(done["batches"]):
            file.write("".join(json.dumps(item) + "\n" for item in batch).encode())
            file.flush()
            tokens = done["tokens"] + sum(len(item["response_ids"]) for item in batch)
            done = {"batches": done["batches"] + 1, "bytes": file.tell(), "tokens": tokens}
            temporary = progress.with_suffix(".tmp")
            temporary.write_text(json.dumps(done))
            os.replace(temporary, progress)
            on_batch(done["batches"], tokens)
            before, clock = clock, time.perf_counter()
            if clock + (clock - before) > until:
                return
