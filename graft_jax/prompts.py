"""From what a user calls a prompt to token ids."""

from collections.abc import Mapping, Sequence
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
    prompt: Prompt, tokenizer: Tokenizer | None, config: ModelConfig, *, system: str | None, raw: bool
) -> list[int]:
    """Token ids of one prompt.

    Args:
        system: goes before a text prompt as the system message.
        raw: a text is encoded as it is, without the chat template.

    Raises:
        ValueError: the prompt is empty, has ids outside the vocabulary, or needs what is not there.
    """
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
            ids = tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])
    elif all(isinstance(item, Mapping) for item in prompt):
        ids = tokenizer.apply_chat_template(list(prompt))  # type: ignore[arg-type]
    else:
        kinds = sorted({type(item).__name__ for item in prompt})
        raise ValueError(f"a prompt is a text, a list of token ids or a list of messages; got a list of {kinds}")
    if not ids:
        raise ValueError("the prompt is empty")
    return ids


def _is_id(item: Any) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)
