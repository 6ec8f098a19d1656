"""Rows fall on ranks and micro-batches: each once, equally many micro-batches everywhere, whatever the numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.slots import Slots, most_rows, rows_of_rank


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """S, B, W."""
    streams, batch = draw(st.integers(1, 40)), draw(st.integers(1, 90))
    return streams, batch, draw(st.integers(1, min(streams, batch, 9)))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(shapes())
def test_most_rows_is_the_maximum_over_starts_and_ranks(shape: tuple[int, int, int]) -> None:
    streams, batch, world = shape
    brute = max(
        sum((g % streams) % world == rank for g in range(start, start + batch))
        for start in range(streams)
        for rank in range(world)
    )
    assert most_rows(batch, streams, world) == brute


@settings(deadline=None, derandomize=True, max_examples=100)
@given(shapes(), st.integers(0, 10**12))
def test_each_row_belongs_to_one_rank_which_owns_its_stream(shape: tuple[int, int, int], first_row: int) -> None:
    streams, batch, world = shape
    ranks = [Slots(streams, batch, world, rank) for rank in range(world)]
    rows = [slots.rows(first_row) for slots in ranks]
    assert sorted(np.concatenate(rows).tolist()) == list(range(first_row, first_row + batch))
    assert sorted(np.concatenate([slots.owned() for slots in ranks]).tolist()) == list(range(streams))
    for slots, mine in zip(ranks, rows, strict=True):
        assert np.all(np.diff(mine) > 0)
        assert set((mine % streams).tolist()) <= set(slots.owned().tolist())


@settings(deadline=None, derandomize=True, max_examples=150)
@given(shapes(), st.one_of(st.none(), st.integers(1, 20)), st.integers(0, 5000))
def test_micro_batches_hold_all_rows_and_are_equally_many_everywhere(
    shape: tuple[int, int, int], micro: int | None, first_row: int
) -> None:
    streams, batch, world = shape
    ranks = [Slots(streams, batch, world, rank, micro) for rank in range(world)]
    assert len({slots.accumulate for slots in ranks}) == 1
    assert len({slots.micro_rows for slots in ranks}) == 1
    for slots in ranks:
        for step in range(3):
            count = len(slots.rows(first_row + step * batch))
            parts = slots.split(count)
            sizes = [part.stop - part.start for part in parts]
            assert len(parts) == slots.accumulate
            assert [row for part in parts for row in range(count)[part]] == list(range(count))
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= slots.micro_rows
        assert slots.micro_rows <= (micro or batch)


def test_no_more_micro_batches_than_the_fullest_rank_needs() -> None:
    assert Slots(streams=8, batch=8, world=2, rank=0, micro=2).accumulate == 2
    assert Slots(streams=8, batch=8, world=3, rank=2, micro=1).accumulate == 3
    assert Slots(streams=8, batch=8, world=1, rank=0).accumulate == 1
    assert Slots(streams=8, batch=8, world=1, rank=0, micro=100).micro_rows == 8


def test_rows_of_rank_for_a_batch_that_wraps_around_the_streams() -> None:
    # Rows 3..7 of 5 streams are from streams 3, 4, 0, 1, 2; rank 0 of 2 owns streams 0, 2, 4.
    assert rows_of_rank(first_row=3, batch=5, streams=5, world=2, rank=0).tolist() == [4, 5, 7]
    assert rows_of_rank(first_row=3, batch=5, streams=5, world=2, rank=1).tolist() == [3, 6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world": 9}, "global_batch_size=8 is smaller than the number of data ranks 9"),
        ({"world": 5}, "num_streams=4 is smaller than the number of data ranks 5"),
        ({"batch": 0}, "global_batch_size=0 must be a whole number of at least 1"),
        ({"streams": 0}, "num_streams=0 must be a whole number of at least 1"),
        ({"world": 0}, "world_size=0 must be a whole number of at least 1"),
        ({"micro": 0}, "micro_batch_size=0 must be a whole number of at least 1"),
        ({"rank": 2}, r"rank=2 must be in \[0, world_size=2\)"),
        ({"rank": -1}, r"rank=-1 must be in \[0, world_size=2\)"),
    ],
)
def test_impossible_numbers_are_refused_with_value_and_fix(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Slots(**{"streams": 4, "batch": 8, "world": 2, "rank": 0, **arguments})
