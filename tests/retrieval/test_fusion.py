"""Reciprocal rank fusion as the paper defines it, with ties in one order."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.retrieval.fusion import fuse

RANKINGS = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=4)


def test_a_score_is_the_sum_of_reciprocal_ranks() -> None:
    fused = fuse([["a", "b", "c"], ["b", "d"]])
    assert [item for item, _ in fused] == ["b", "a", "d", "c"]
    assert [score for _, score in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63])


def test_equal_scores_keep_the_order_of_first_appearance() -> None:
    assert [item for item, _ in fuse([["a", "b"], ["b", "a"]])] == ["a", "b"]
    assert [item for item, _ in fuse([["z"], ["a"]])] == ["z", "a"]


def test_an_item_twice_in_a_ranking_counts_once_and_takes_no_rank() -> None:
    assert fuse([["a", "a", "b"]]) == [("a", 1 / 61), ("b", 1 / 62)]


def test_nothing_fuses_to_nothing() -> None:
    assert fuse([]) == fuse([[], []]) == []


@given(RANKINGS)
def test_every_item_comes_once_and_scores_fall(rankings: list[list[str]]) -> None:
    fused = fuse(rankings)
    assert {item for item, _ in fused} == {item for ranking in rankings for item in ranking}
    assert len({item for item, _ in fused}) == len(fused)
    assert all(above >= below for (_, above), (_, below) in pairwise(fused))


@given(st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_one_ranking_keeps_its_order(ranking: list[str]) -> None:
    assert [item for item, _ in fuse([ranking])] == ranking
