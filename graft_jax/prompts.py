"""From what a user calls a prompt to token ids."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft_jax.config import ModelConfig
from graft_jax.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def split_prompts(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Tells one prompt from several.

    A text, a list of token ids and a list of messages are one prompt; a list of such is several.

    Returns:
        Whether it is one, and the prompts as a list.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    items = list(prompts)
    if not items:
        raise ValueError("the prompt is empty")
    if all(isinstance(item, Mapping) for item in items) or all(_is_id(item) for item in items):
        return True, [items]
    return False, items


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    *,
    system: str | None = None,
    raw: bool = False,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of one prompt.

    Args:
        system: goes before a text prompt as the system message.
        raw: a text is encoded as it is, without the chat template.
        template_args: variables of the chat template, e.g. `{"enable_thinking": False}`.

    Raises:
        ValueError: the prompt is empty, has ids outside the vocabulary, or needs what is not there.
    """
    variables = dict(template_args or {})
    if not isinstance(prompt, str) and all(_is_id(item) for item in prompt):
        ids = [int(item) for item in prompt]  # type: ignore[arg-type]
        for i, token in enumerate(ids):
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"prompt id {token} at position {i} is outside the vocabulary of {config.vocab_size}")
    elif tokenizer is None:
        raise ValueError("the model has no tokenizer; give the prompt as token ids")
    elif isinstance(prompt, str):
        if not prompt.strip() and not (raw and prompt):
            raise ValueError("the prompt is empty")
        if raw or not tokenizer.has_chat_template:
            if system is not None:
                raise ValueError("a system message needs a chat template (and not raw)")
            ids = tokenizer.encode(prompt)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            ids = tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}], **variables)
    elif all(isinstance(item, Mapping) for item in prompt):
        ids = tokenizer.apply_chat_template(list(prompt), **variables)  # type: ignore[arg-type]
    else:
        kinds = sorted({type(item).__name__ for item in prompt})
        raise ValueError(f"a prompt is a text, a list of token ids or a list of messages; got a list of {kinds}")
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def _is_id(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file of prompts.

    Each line is an object with `prompt` (a text or token ids), `messages` (a conversation that ends with the
    user), or `turns` (the user's turns, answered one after the other, as in Spec-Bench).

    Returns:
        An object a line with "line" (its number), "turns" (a list of prompts) or "messages", and
        "question_id" where the line has one.

    Raises:
        ValueError: a line is broken; names it.
    """
    found = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: no JSON: {error}") from None
            keys = [key for key in ("turns", "prompt", "messages") if isinstance(item, dict) and key in item]
            if len(keys) != 1:
                raise ValueError(f"{path}:{number}: needs an object with one of `turns`, `prompt`, `messages`")
            value = item[keys[0]]
            good = isinstance(value, list) and bool(value)
            if keys[0] == "turns":
                good &= good and all(isinstance(turn, str) for turn in value)
            elif keys[0] == "messages":
                good &= good and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value)
            else:
                good = isinstance(value, str) or (good and all(_is_id(token) for token in value))
            if not good:
                raise ValueError(f"{path}:{number}: {keys[0]}={value!r} is not what it should be")
            entry: dict[str, Any] = {"line": number}
            if "question_id" in item:
                entry["question_id"] = item["question_id"]
            entry["messages" if keys[0] == "messages" else "turns"] = [value] if keys[0] == "prompt" else value
            found.append(entry)
    if not found:
        raise ValueError(f"{path}: holds no prompts")
    return found
