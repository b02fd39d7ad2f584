"""Reciprocal rank fusion: one ranking out of several, from ranks alone.

Cormack, Clarke and Büttcher, "Reciprocal rank fusion outperforms Condorcet and individual rank learning methods", SIGIR
2009: a passage's score is the sum of 1 / (RANK_OFFSET + rank) over the rankings that hold it, rank counted from 1.
Scores of different searches need no common scale.
"""

from collections.abc import Hashable, Sequence
from typing import TypeVar

RANK_OFFSET = 60  # the paper's k

Item = TypeVar("Item", bound=Hashable)


def fuse(rankings: Sequence[Sequence[Item]]) -> list[tuple[Item, float]]:
    """The items of all rankings with their scores, best first.

    Equal scores keep the order of first appearance, earlier rankings first. An item that a ranking holds twice counts
    there once, at its better rank.
    """
    scores: dict[Item, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(dict.fromkeys(ranking), 1):
            scores[item] = scores.get(item, 0.0) + 1.0 / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda scored: -scored[1])
