"""Sources are mixed by tokens: shares hold from each change on, in every stream, and the first batch is mixed."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.mixture import History, neediest, normalise, parse, phases, resume, segment

shares = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any).map(lambda w: np.array(w) / sum(w))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(shares, st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(0, 31))
def test_drawing_the_neediest_keeps_every_source_near_its_share(
    weights: np.ndarray, lengths: list[int], stream: int
) -> None:
    drawn = -phases(weights, 32)[stream] * lengths[0]
    start = drawn.copy()
    for length in lengths:
        drawn[neediest(weights, drawn)] += length
        taken = drawn - start
        assert np.all(np.abs(taken - weights * taken.sum()) <= 2 * max(lengths))
        assert np.all(taken[weights == 0] == 0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(shares, st.integers(1, 64))
def test_phases_are_where_unit_draws_lead(weights: np.ndarray, streams: int) -> None:
    table = phases(weights, streams)
    assert table.shape == (streams, len(weights))
    assert np.allclose(table.sum(axis=1), 0, atol=1e-9)
    assert np.all(np.abs(table) < 2)
    # So the first draws of all streams together are one run of the rule, but for ties: the first batch is mixed.
    first = np.bincount([neediest(weights, -deficit) for deficit in table], minlength=len(weights))
    assert np.all(np.abs(first - weights * streams) < 3)


def test_ties_and_zero_weights() -> None:
    assert neediest(np.array([0.5, 0.5]), np.zeros(2)) == 0
    assert neediest(np.array([0.0, 0.5, 0.5]), np.zeros(3)) == 1
    assert neediest(np.array([0.0, 1.0]), np.array([-5.0, 100.0])) == 1


# -- what a user may write --------------------------------------------------------------------------------------------

SIZES = {"code": 300, "prose": 100}


def test_shares_default_to_bytes() -> None:
    assert parse(None, SIZES) == [(0, {"code": 0.75, "prose": 0.25})]


def test_weights_need_not_sum_to_one_nor_name_every_source() -> None:
    assert parse({"code": 1, "prose": 3}, SIZES) == [(0, {"code": 0.25, "prose": 0.75})]
    assert parse({"prose": 7}, SIZES) == [(0, {"code": 0.0, "prose": 1.0})]


def test_a_schedule_is_a_history_known_in_advance() -> None:
    history = parse({500: {"code": 1}, 0: {"code": 1, "prose": 1}}, SIZES)
    assert history == [(0, {"code": 0.5, "prose": 0.5}), (500, {"code": 1.0, "prose": 0.0})]
    assert [segment(history, row) for row in (0, 499, 500, 10**9)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ({"cod": 1}, "unknown source 'cod'; the sources are .'code', 'prose'."),
        ({1: 2.0, "b": 1}, "unknown source"),
        ({"code": -1}, "weight of 'code' is -1"),
        ({"code": "3"}, "weight of 'code' is '3'"),
        ({"code": True}, "weight of 'code' is True"),
        ({"code": float("nan")}, "weight of 'code' is nan"),
        ({"code": float("inf")}, "weight of 'code' is inf"),
        ({"code": 0, "prose": 0}, "no positive weight"),
        ({}, "no positive weight"),
        ([3, 1], r"mixture=\[3, 1\] must be a mapping"),
        ({10: {"code": 1}}, "starts at row 10"),
        ({0: {"code": 1}, -5: {"code": 2}}, "not -5"),
        ({0: {"code": 1}, "later": {"code": 2}}, "not 'later'"),
        ({0: {"code": 1}, 1.5: {"code": 2}}, "not 1.5"),
        ({0: {"code": 1}, 5: 3}, "row 5 .* 3"),
        ({0: {"code": 1}, 5: {"cod": 3}}, "unknown source 'cod'"),
    ],
)
def test_what_makes_no_sense_is_refused(mixture: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(mixture, SIZES)


def test_normalise_names_every_source() -> None:
    assert normalise({"b": 2}, ["a", "b"]) == {"a": 0.0, "b": 1.0}


# -- going on ---------------------------------------------------------------------------------------------------------

EQUAL, CODE, PROSE = ({"code": c, "prose": 1 - c} for c in (0.5, 1.0, 0.0))


@pytest.mark.parametrize(
    ("past", "wanted", "row", "expected"),
    [
        pytest.param([(0, CODE)], [(0, EQUAL)], 0, [(0, EQUAL)], id="nothing was read: the past does not count"),
        pytest.param([(0, EQUAL)], [(0, EQUAL)], 70, [(0, EQUAL)], id="no change, no new count"),
        pytest.param([(0, EQUAL)], [(0, CODE)], 70, [(0, EQUAL), (70, CODE)], id="change at resume"),
        pytest.param(
            [(0, EQUAL), (100, CODE)], [(0, EQUAL), (100, CODE)], 70, [(0, EQUAL), (100, CODE)], id="schedule goes on"
        ),
        pytest.param(
            [(0, EQUAL), (100, CODE)], [(0, EQUAL)], 70, [(0, EQUAL)], id="schedule dropped before its change"
        ),
        pytest.param(
            [(0, EQUAL), (100, CODE)],
            [(0, EQUAL)],
            170,
            [(0, EQUAL), (100, CODE), (170, EQUAL)],
            id="dropped behind it",
        ),
        pytest.param(
            [(0, EQUAL)], [(0, CODE), (200, PROSE)], 70, [(0, EQUAL), (70, CODE), (200, PROSE)], id="schedule added"
        ),
        pytest.param(
            [(0, EQUAL), (70, CODE)], [(0, PROSE)], 70, [(0, EQUAL), (70, PROSE)], id="changed twice at a row"
        ),
        pytest.param(
            [(0, CODE)], [(0, {"code": 1.0, "more": 0.0})], 70, [(0, CODE)], id="a source of weight 0 changes nothing"
        ),
    ],
)
def test_history_of_a_resumed_run(past: History, wanted: History, row: int, expected: History) -> None:
    assert resume(past, wanted, row) == expected


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([EQUAL, CODE, PROSE])), max_size=5))
def test_a_chain_of_resumes_keeps_what_was_in_force_and_obeys_from_then_on(changes: list) -> None:
    history: History = [(0, EQUAL)]
    for row, weights in sorted(changes, key=lambda change: change[0]):
        before = [history[segment(history, g)][1] for g in range(row)]
        history = resume(history, [(0, weights)], row)
        assert [history[segment(history, g)][1] for g in range(row)] == before
        assert history[segment(history, row)][1] == weights
        firsts = [first for first, _ in history]
        assert firsts == sorted(set(firsts))


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 0.1, 1 / 3]),
)
def test_weights_are_the_same_in_any_order_and_unit_and_if_done_again(
    counts: list[int], random: Random, unit: float
) -> None:
    names = [f"s{i}" for i in range(len(counts))]
    mixture = dict(zip(names, counts, strict=True))
    shuffled = {name: mixture[name] for name in random.sample(names, len(names))}
    weights = normalise(mixture, names)
    assert normalise(shuffled, names) == weights == normalise(weights, names)
    again = normalise({name: weight * unit for name, weight in mixture.items()}, names)
    assert resume([(0, weights)], [(0, again)], 5) == [(0, weights)]  # no change, whatever the last bit
