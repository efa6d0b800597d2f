"""Retrieval templates: static trees of successor ranks.

A template node says "the r-th most likely successor of my parent's token"; a path of ranks from the root
names it. Templates are static, so one gather a level fills them from the successor table.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Template:
    """A tree of successor ranks, without its root.

    Attributes:
        paths: rank paths from the root, in order of priority, so that every prefix of them is a tree.

    Raises:
        ValueError: a path is empty, negative or repeated, or stands before its parent.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        seen: set[tuple[int, ...]] = set()
        for path in self.paths:
            if not path or min(path) < 0:
                raise ValueError(f"template path {path} must hold ranks of at least 0")
            if path in seen:
                raise ValueError(f"template path {path} stands twice")
            if len(path) > 1 and path[:-1] not in seen:
                raise ValueError(f"template path {path} stands before its parent {path[:-1]}")
            seen.add(path)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def max_depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def width(self) -> int:
        """How many successors a table row must offer: the largest rank and one."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @property
    def depth_counts(self) -> tuple[int, ...]:
        """Nodes at depth 1, 2, ..."""
        return tuple(sum(len(path) == d for path in self.paths) for d in range(1, self.max_depth + 1))

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of node i as a node index, the root being 0 and the first path 1."""
        index = {(): 0} | {path: i for i, path in enumerate(self.paths, 1)}
        return tuple(index[path[:-1]] for path in self.paths)

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of node i among its parent's successors."""
        return tuple(path[-1] for path in self.paths)

    @functools.cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node indices (the root being 0) by depth, from depth 1."""
        return tuple(
            tuple(i for i, path in enumerate(self.paths, 1) if len(path) == d) for d in range(1, self.max_depth + 1)
        )

    @functools.cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes on its path from depth 1 down to itself (the root being 0)."""
        index = {path: i for i, path in enumerate(self.paths, 1)}
        return tuple(tuple(index[path[: d + 1]] for d in range(len(path))) for path in self.paths)

    def prefix(self, size: int) -> "Template":
        """The first `size` nodes."""
        return Template(self.paths[:size])

    def extended(self, other: "Template") -> "Template":
        """This template, then those nodes of `other` that it lacks."""
        have = set(self.paths)
        return Template(self.paths + tuple(path for path in other.paths if path not in have))


def from_depth_counts(counts: Sequence[int]) -> Template:
    """Builds a template from its number of nodes at each depth.

    Each depth takes, among the children of the chosen parents, the `counts[d]` paths with the smallest
    sum of log(1 + rank), ties lexicographic: high ranks get more children and go deeper, and the chain of
    rank 0 reaches the last depth. Nested counts give nested templates (Graft, appendix A.1, prints the
    counts but not the paths; this construction fits all that is printed).

    Raises:
        ValueError: a count is below 1, or larger than the children there are with 8 successors a node.
    """
    width = 8
    previous: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for depth, count in enumerate(counts, 1):
        children = [(*path, rank) for path in previous for rank in range(width)]
        if not 1 <= count <= len(children):
            raise ValueError(f"depth {depth} asks for {count} nodes; between 1 and {len(children)} fit")
        children.sort(key=lambda path: (sum(math.log1p(rank) for rank in path), path))
        previous = children[:count]
        paths += previous
    return Template(tuple(paths))


def chain(length: int) -> Template:
    """The most likely successor, and again, `length` times."""
    return Template(tuple((0,) * depth for depth in range(1, length + 1)))


def from_children(children: Iterable[tuple[tuple[int, ...], int]]) -> Template:
    """Builds a template from (path, number of children) pairs, parents first, in that order."""
    return Template(tuple((*path, rank) for path, count in children for rank in range(count)))


# Graft's templates by stage (table 7): full envelope, pruned at the root, after depth 1, after depth 5.
GRAFT_FULL = from_depth_counts((8, 16, 14, 11, 8, 7, 6, 5, 5))
GRAFT_D0 = from_depth_counts((8, 10, 8, 6, 5, 4, 4, 4, 3))
GRAFT_D1 = from_depth_counts((6, 7, 5, 4, 4, 3, 3, 2, 2))
GRAFT_D5 = from_depth_counts((4, 3, 3, 2, 2, 2, 2, 1, 1))

# The same nodes in one order, in which each stage's template is a prefix: of 20, 36, 52 and 80 nodes.
GRAFT_NESTED = GRAFT_D5.extended(GRAFT_D1).extended(GRAFT_D0).extended(GRAFT_FULL)

# Token Recycling's static tree "2.2.2" (80 nodes, 6 levels).
TOKEN_RECYCLING = from_children(
    [((), 8)]
    + [((0,), 8), ((1,), 4), ((2,), 3), ((3,), 2), ((4,), 1), ((5,), 1), ((6,), 1), ((7,), 1)]
    + [((0, 0), 8), ((0, 1), 3), ((0, 2), 2), ((0, 3), 1), ((0, 4), 1), ((0, 5), 1), ((0, 6), 1), ((0, 7), 1)]
    + [((1, 0), 2), ((1, 1), 1), ((2, 0), 1), ((3, 0), 1), ((4, 0), 1), ((5, 0), 1)]
    + [((0, 0, 0), 5), ((0, 0, 1), 2), ((0, 0, 2), 1), ((0, 0, 3), 1), ((0, 0, 4), 1), ((0, 1, 0), 1)]
    + [((0, 2, 0), 1), ((1, 0, 0), 1), ((2, 0, 0), 1), ((3, 0, 0), 1)]
    + [((0, 0, 0, 0), 3), ((0, 0, 0, 1), 1), ((0, 0, 0, 2), 1), ((0, 0, 1, 0), 1), ((0, 1, 0, 0), 1)]
    + [((1, 0, 0, 0), 1), ((0, 0, 0, 0, 0), 2), ((0, 0, 0, 1, 0), 1)]
)

# Small templates, narrow and deep; every prefix is one, and those of 3, 5, 7, 15 and 31 nodes were chosen by
# replaying what the target wrote itself (scripts/choose_template.py): 7 nodes are 2, 1, 1, 1, 1, 1 by depth.
NARROW = Template(
    tuple(
        tuple(map(int, path))
        for path in """
        0 00 000
        0000 1
        00000 000000
        2 0000000 00000000 01 3 10 000000000 0000000000
        4 00000000000 5 000000000000 02 001 6 20 100 7 010 03 0001 11 30 40
        """.split()
    )
)

NAMED = {"narrow": NARROW, "graft": GRAFT_NESTED, "recycling": TOKEN_RECYCLING}
