"""Evaluation prompts: JSON lines with `turns`, as in Spec-Bench."""

import json
from pathlib import Path


def read_first_turns(path: str | Path, limit: int) -> list[str]:
    """The first turn of up to `limit` questions.

    Raises:
        ValueError: a line is no JSON object with `turns`; names it.
    """
    prompts = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(prompts) == limit:
                break
            try:
                prompts.append(str(json.loads(line)["turns"][0]))
            except (ValueError, KeyError, IndexError, TypeError):
                raise ValueError(f"{path}:{number}: needs a JSON object with a list `turns`") from None
    return prompts


def loops(tokens: list[int]) -> bool:
    """Whether fewer than half of a text's 4-grams are new: such answers flatter every drafter, and teach it little."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:]))
    return bool(grams) and len(set(grams)) < 0.5 * len(grams)
