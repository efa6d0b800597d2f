"""Shapes that rounds use, for tests and benchmarks."""

from typing import NamedTuple


class Spec(NamedTuple):
    """N rows of V logits, k best."""

    rows: int
    vocabulary: int
    k: int


# The successor table's update keeps 8 of every tree node's row; DDTree and DominoTree take candidates of a block.
SPECS = {
    "smollm2-135m table": Spec(17, 49152, 8),
    "qwen3-4b table": Spec(61, 151936, 8),
    "qwen3-8b table": Spec(17, 151936, 8),
    "llama-3.1-8b table": Spec(65, 128256, 8),
    "qwen3-4b ddtree": Spec(15, 151936, 16),
    "qwen3-8b dominotree": Spec(15, 151936, 64),
}
