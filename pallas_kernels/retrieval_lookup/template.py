"""Static facts of a template, as index arrays."""

import functools
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """A template of n nodes of D levels, of which the widest has L lanes.

    Attributes:
        depth: [n], from 0.
        paths: [D, n], the ranks from the root down to each node; -1 behind its depth.
        parent_lane, rank: [D, L], by level: the parent's lane in the level before, and the node's rank.
        place: [n, 2], level and lane of each node.
    """

    depth: np.ndarray
    paths: np.ndarray
    parent_lane: np.ndarray
    rank: np.ndarray
    place: np.ndarray


@functools.lru_cache(maxsize=64)
def plan(parents: tuple[int, ...], ranks: tuple[int, ...]) -> Plan:
    """Facts of the template whose node i (from 1; 0 is the root) hangs from `parents[i - 1]`.

    Raises:
        ValueError: a parent does not stand before its child, or a rank is negative.
    """
    if len(parents) != len(ranks):
        raise ValueError(f"{len(parents)} parents and {len(ranks)} ranks must be as many")
    lines: list[tuple[int, ...]] = [()]
    for i, (parent, rank) in enumerate(zip(parents, ranks), 1):
        if not 0 <= parent < i or rank < 0:
            raise ValueError(f"node {i}: parent {parent} must be between 0 and {i - 1}, rank {rank} at least 0")
        lines.append((*lines[parent], rank))
    n, D = len(parents), max(map(len, lines))
    depth = np.array([len(line) - 1 for line in lines[1:]], np.int32)
    paths = np.full((D, n), -1, np.int32)
    place = np.zeros((n, 2), np.int32)
    filled = [0] * D
    for i, line in enumerate(lines[1:]):
        paths[: len(line), i] = line
        place[i] = depth[i], filled[depth[i]]
        filled[depth[i]] += 1
    parent_lane, rank = np.zeros((2, D, max(filled, default=0)), np.int32)
    for i, (d, lane) in enumerate(place):
        parent_lane[d, lane] = place[parents[i] - 1, 1] if parents[i] else 0
        rank[d, lane] = ranks[i]
    return Plan(depth, paths, parent_lane, rank, place)
