"""Speculative output beside plain decoding's: equality, near-ties with their margin, speedup."""

from typing import Any

from graft_jax.engine import SpeculativeDecoder
from graft_jax.prompts import encode_prompt, split_prompts
from graft_jax.results import Generation
from graft_jax.session import Request


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two outputs differ; None if they are equal."""
    for i, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def difference(
    plain: SpeculativeDecoder, prompt: Any, baseline: Generation, result: Generation, settings: dict[str, Any]
) -> tuple[int | None, float | None]:
    """Where an output leaves plain decoding's, and plain decoding's margin between the two tokens there.

    Args:
        plain: the decoder that made `baseline`.
        settings: arguments of `generate` that both had.

    Returns:
        Index of the first difference and the margin; None where there is none.
    """
    at = first_difference(baseline.token_ids, result.token_ids)
    margin = None
    if at is not None and at < min(len(baseline.token_ids), len(result.token_ids)):
        encoding = {key: settings[key] for key in ("system", "raw", "template_args") if key in settings}
        ids = encode_prompt(split_prompts(prompt)[1][0], plain.tokenizer, plain.config, **encoding)
        request = Request(**{key: value for key, value in settings.items() if key not in encoding})
        before = ids + baseline.token_ids[:at]
        margin = plain.margin(before, baseline.token_ids[at], result.token_ids[at], request)
    return at, margin


def compare_with_plain(
    decoder: SpeculativeDecoder, prompt: Any, result: Generation, settings: dict[str, Any]
) -> dict[str, Any]:
    """Decodes one prompt plainly in this process and compares.

    Returns:
        "equal"; "first_difference", an index into the new tokens, and "margin", by how much plain
        decoding's processed logits (noise included) preferred its own token there (both None if equal);
        "speedup", of tokens a second of decoding.
    """
    plain = decoder.with_method("ar")
    plain.generate(prompt, **{**settings, "max_new_tokens": 2})  # compile and touch everything once
    baseline = plain.generate(prompt, **settings)
    at, margin = difference(plain, prompt, baseline, result, settings)
    speed, base = result.stats.tokens_per_second, baseline.stats.tokens_per_second
    return {
        "equal": at is None,
        "first_difference": at,
        "margin": margin,
        "speedup": speed / base if base else None,
    }
