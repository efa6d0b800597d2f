"""Shapes that rounds use, for tests and benchmarks."""

from typing import NamedTuple


class Spec(NamedTuple):
    """A points of attachment, a vocabulary, contexts of `order` tokens over `log2_rows`, and a template's size."""

    points: int
    vocabulary: int
    order: int
    nodes: int
    width: int = 8
    log2_rows: int = 16


# Order 1 is the papers' table.
SPECS = {
    "smollm2-135m": Spec(1, 49152, 3, 16),
    "qwen3-4b": Spec(1, 151936, 1, 60),
    "qwen3-8b": Spec(1, 151936, 3, 60),
    "llama-3.1-8b": Spec(2, 128256, 3, 64),
    "qwen3-4b ends": Spec(17, 151936, 2, 16),
}
