"""Shapes that rounds use, for tests and benchmarks."""

from typing import NamedTuple


class Spec(NamedTuple):
    """B rows of W lanes, rank R, M candidates, C children."""

    batch: int
    lanes: int
    rank: int
    candidates: int
    children: int


# The published heads have rank 256; W is the tree's budget.
SPECS = {
    "smollm2-135m": Spec(1, 16, 64, 64, 8),
    "qwen3-4b": Spec(1, 16, 256, 64, 8),
    "qwen3-4b large": Spec(1, 64, 256, 64, 8),
    "qwen3-8b": Spec(2, 60, 256, 64, 8),
}
