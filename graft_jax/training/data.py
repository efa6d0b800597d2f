"""Texts to train on: conversations become token ids with a mask of what the assistant said."""

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graft_jax.bench.datasets import loops
from graft_jax.config import ModelConfig
from graft_jax.tokenizer import Tokenizer

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text: token ids, and which of them are trained on."""

    ids: np.ndarray  # [n] int32
    mask: np.ndarray  # [n] bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()


def read_documents(
    path: str | Path,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    *,
    on_bad_line: str = "refuse",
    report: Callable[[str], None] = lambda message: None,
) -> Iterator[Document]:
    """Reads JSON lines, or a .txt file as one plain text; either may be gzipped.

    A line is an object with one of: `messages` (OpenAI: objects with "role" and "content"), `conversations`
    (ShareGPT: "from" and "value"), `text` (all of it is trained on), or `prompt_ids` and `response_ids`.

    Args:
        on_bad_line: "refuse" raises at the first bad line, "skip" reports it and goes on.
        report: gets a message a skipped line.

    Raises:
        ValueError: names the file and the line.
    """
    for number, line in _lines(path, on_bad_line):
        if number == 0:
            yield _plain(line, tokenizer)
            continue
        try:
            yield _document(json.loads(line), tokenizer, config)
        except ValueError as error:
            message = f"{path}:{number}: {error}"
            if on_bad_line == "refuse":
                raise ValueError(message) from None
            report(message)


def read_conversations(path: str | Path, *, on_bad_line: str = "refuse") -> Iterator[list[dict[str, str]]]:
    """The conversations of a file of JSON lines, as messages. Arguments and errors as for `read_documents`."""
    for number, line in _lines(path, on_bad_line):
        try:
            if number == 0:
                raise ValueError("is plain text: there is nothing to answer")
            item = json.loads(line)
            if not isinstance(item, Mapping) or not {"messages", "conversations"} & set(item):
                raise ValueError("needs an object with `messages` or `conversations`")
            yield (
                _messages(item["messages"], "role", "content")
                if "messages" in item
                else _messages(item["conversations"], "from", "value")
            )
        except ValueError as error:
            if on_bad_line == "refuse" or number == 0:
                raise ValueError(f"{path}:{number}: {error}") from None


def _lines(path: str | Path, on_bad_line: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank; number 0 is the whole of a plain text."""
    if on_bad_line not in ("refuse", "skip"):
        raise ValueError(f"on_bad_line={on_bad_line!r} must be 'refuse' or 'skip'")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data={str(path)!r}: no such file")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if path.name.removesuffix(".gz").endswith(".txt"):
            yield 0, file.read()
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _document(item: Any, tokenizer: Tokenizer | None, config: ModelConfig) -> Document:
    if not isinstance(item, Mapping):
        raise ValueError(f"needs an object, got {type(item).__name__}")
    if "prompt_ids" in item:
        return from_ids(item["prompt_ids"], item.get("response_ids"), config)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: only lines of `prompt_ids` and `response_ids` can be read")
    if "messages" in item:
        return from_messages(_messages(item["messages"], "role", "content"), tokenizer)
    if "conversations" in item:
        return from_messages(_messages(item["conversations"], "from", "value"), tokenizer)
    if "text" in item:
        if not isinstance(item["text"], str):
            raise ValueError("`text` must be a text")
        return _plain(item["text"], tokenizer)
    raise ValueError("needs one of `messages`, `conversations`, `text`, `prompt_ids` with `response_ids`")


def _messages(turns: Any, role: str, content: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise ValueError("needs a list of at least one message")
    found = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or turn.get(role) not in _ROLES or not isinstance(turn.get(content), str):
            raise ValueError(f"message {i} needs {role!r} (one of {sorted(_ROLES)}) and a text {content!r}")
        found.append({"role": _ROLES[turn[role]], "content": turn[content]})
    return found


def from_ids(prompt: Any, response: Any, config: ModelConfig) -> Document:
    """A prompt and the answer to train on, as token ids.

    Raises:
        ValueError: one is no list of ids of the vocabulary, or the answer is empty.
    """
    for name, ids in (("prompt_ids", prompt), ("response_ids", response)):
        good = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not good or not all(0 <= i < config.vocab_size for i in ids):
            raise ValueError(f"`{name}` must be a list of ids below {config.vocab_size}")
    if not response:
        raise ValueError("`response_ids` is empty: there is nothing to train on")
    ids = np.array(prompt + response, np.int32)
    return Document(ids, np.arange(len(ids)) >= len(prompt))


def from_messages(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> Document:
    """A conversation under the chat template; what the assistant says is trained on.

    Templates need no generation marks: an assistant's turn is what the template adds between the header that
    asks for it and its end. The end of the turn counts too, for the model has to say it.

    Raises:
        ValueError: nobody but the assistant's turns, none of them, or a template that rewrites earlier turns.
    """
    text = tokenizer.render_chat(messages, add_generation_prompt=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        before = tokenizer.render_chat(messages[:i], add_generation_prompt=True)
        upto = tokenizer.render_chat(messages[: i + 1], add_generation_prompt=False)
        if not text.startswith(upto) or not upto.startswith(before):
            raise ValueError(f"message {i}: the chat template rewrites earlier turns, so the answer cannot be told")
        end = len(before) + len(upto[len(before) :].rstrip())
        if not message["content"].strip() or end <= len(before):
            raise ValueError(f"message {i}: the assistant's turn is empty")
        spans.append((len(before), end))
    if not spans:
        raise ValueError("holds no assistant's turn after another's")
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    mask = np.zeros(len(encoding.ids), bool)
    for start, stop in spans:
        mask |= [start < b and a < stop for a, b in encoding.offsets]
    if not mask.any() or mask.all():
        raise ValueError("the assistant's turns cannot be told from the rest")
    return Document(np.array(encoding.ids, np.int32), mask)


def _plain(text: str, tokenizer: Tokenizer | None) -> Document:
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: plain text cannot be read")
    ids = np.array(tokenizer.encode(text), np.int32)
    if len(ids) < 2:
        raise ValueError("the text is empty")
    return Document(ids, np.ones(len(ids), bool))


def select(documents: Iterator[Document], *, keep_loops: bool = False) -> tuple[list[Document], dict[str, int]]:
    """Leaves out texts seen before and texts that loop; counts what went."""
    seen: set[str] = set()
    kept, counts = [], {"kept": 0, "duplicates": 0, "loops": 0}
    for document in documents:
        digest = document.digest
        if digest in seen:
            counts["duplicates"] += 1
        elif not keep_loops and loops(document.ids[document.mask].tolist()):
            counts["loops"] += 1
        else:
            seen.add(digest)
            kept.append(document)
            counts["kept"] += 1
    return kept, counts


def held_out(document: Document, share: float) -> bool:
    """Whether a text belongs to the evaluation: decided by its content, so the same in every run."""
    return int(document.digest[:8], 16) < share * 2**32
