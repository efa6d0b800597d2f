"""The toy world: a small language and two targets trained on it, small enough for every test.

`toy/llama` and `toy/qwen3` are ordinary Hugging Face folders with bfloat16 weights, written by
`scripts/train_toy_targets.py`. Their drafters have graded acceptance: some tokens follow from the one before,
some from the last few, some from the document's header, some are open.
"""

from toy.language import EOS, NUM_TOKENS, SEP, VOCAB_SIZE, Language
from toy.plain import distinct_4grams, greedy, min_margin, safe_prompts, sample_prompts
from toy.store import FOLDER, NAMES, facts, load

__all__ = [
    "EOS",
    "FOLDER",
    "NAMES",
    "NUM_TOKENS",
    "SEP",
    "VOCAB_SIZE",
    "Language",
    "distinct_4grams",
    "facts",
    "greedy",
    "load",
    "min_margin",
    "safe_prompts",
    "sample_prompts",
]
