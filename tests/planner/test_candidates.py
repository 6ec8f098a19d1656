"""Which of several configurations comes first."""

from lightning_fms.planner.candidates import Candidate, ranked
from lightning_fms.planner.memory import Prediction, Verdict
from lightning_fms.planner.space import Configuration
from lightning_fms.planner.throughput import StepTime


def candidate(rows: int, micro_batches: int, seconds: float = 1.0, verdict: Verdict = Verdict.FIT) -> Candidate:
    memory = Prediction(rows * 1e9, "forward", {}, rows * 1e9, rows * 1e9)
    configuration = Configuration(micro_batch_size=rows, micro_batches=micro_batches)
    return Candidate(configuration, memory, verdict, StepTime(seconds, seconds, 0.5, {}))


def test_of_equal_estimates_the_larger_micro_batch_comes_first() -> None:
    small, large = candidate(2, 4), candidate(8, 1)
    assert ranked([small, large]) == [large, small]


def test_of_equal_estimates_what_fits_for_sure_comes_before_what_may() -> None:
    sure, large = candidate(2, 4), candidate(8, 1, verdict=Verdict.MAYBE)
    assert ranked([large, sure, candidate(16, 1, verdict=Verdict.NO)]) == [sure, large]


def test_a_faster_one_comes_first_whatever_its_micro_batches() -> None:
    fast, slow = candidate(2, 4, 0.9), candidate(8, 1)
    assert ranked([slow, fast]) == [fast, slow]
