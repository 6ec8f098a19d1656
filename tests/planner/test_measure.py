"""Successive halving over made-up times."""

import math

import pytest

from lightning_fms.planner.measure import Trial, halve


def test_the_first_third_of_the_steps_does_not_count() -> None:
    assert Trial([90, 40, 1, 3, 2]).seconds == 2
    assert Trial([7]).seconds == math.inf
    assert Trial(out_of_memory=True).seconds == math.inf


def test_each_round_is_longer_and_for_the_faster_third() -> None:
    runs: list[tuple[int, int]] = []

    def run(candidate: int, steps: int) -> Trial:
        runs.append((candidate, steps))
        return Trial([1.0 + candidate] * steps)

    found = halve([5, 3, 8, 1, 7, 2, 6, 4, 9], run, [5, 15, 50])
    assert found.fastest == 1
    assert sorted(c for c, steps in runs if steps == 15) == [1, 2, 3]
    assert [c for c, steps in runs if steps == 50] == [1]
    assert {c: len(t.step_seconds) for c, t in found.trials} == {
        1: 50,
        2: 15,
        3: 15,
        **dict.fromkeys((4, 5, 6, 7, 8, 9), 5),
    }


def test_a_lucky_start_is_found_out() -> None:
    found = halve(["lucky", "steady"], lambda c, n: Trial([1.0 if n == 5 and c == "lucky" else 2.0] * n), [5, 15])
    assert found.fastest == "lucky"  # of two, a third is one: the other is not looked at again
    found = halve(
        ["lucky", "b", "c", "d"],
        lambda c, n: Trial([{"lucky": 3.0 if n > 5 else 1.0, "b": 2.0}.get(c, 9.0)] * n),
        [5, 15],
    )
    assert found.fastest == "b"


@pytest.mark.parametrize("bad", [Trial(out_of_memory=True), Trial(error="no")])
def test_what_fails_is_a_result_and_goes_no_further(bad: Trial) -> None:
    runs: list[str] = []

    def run(candidate: str, steps: int) -> Trial:
        runs.append(candidate)
        return bad if candidate == "bad" else Trial([1.0] * steps)

    found = halve(["bad", "good"], run, [3, 6])
    assert runs == ["bad", "good", "good"]
    assert found.fastest == "good"
    assert dict(found.trials)["bad"] is bad
    assert halve(["bad"], run, [3, 6]).fastest is None
