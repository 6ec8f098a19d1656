"""The arithmetic of a memory prediction: lines through probes, corrections, verdicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fms.planner.memory import GIB, Outside, Prediction, Verdict, at_size, predict, resharded
from lightning_fms.planner.probe import depth_pair

NO_WORKSPACE = Outside(workspace=0.0)


def planes(coefficients: dict[str, tuple[int, int, int, int]]) -> dict[tuple[int, int], dict[str, tuple[int, int]]]:
    """Probes of phases `a + b m + c L + d m L` at rows 2, 3 and depths 2, 4; a tenth could be moved."""
    return {
        (m, depth): {
            name: (a + b * m + c * depth + d * m * depth, (a + c * depth) // 10)
            for name, (a, b, c, d) in coefficients.items()
        }
        for m in (2, 3)
        for depth in (2, 4)
    }


number = st.integers(0, 10**6)


@given(st.tuples(number, number, number, number), st.integers(1, 64), st.integers(1, 96))
def test_a_phase_is_on_its_plane_at_any_size(coefficients: tuple[int, int, int, int], rows: int, depth: int) -> None:
    a, b, c, d = coefficients
    found = at_size(planes({"x": coefficients}), rows, depth)
    assert found["x"][0] == pytest.approx(a + b * rows + c * depth + d * rows * depth, abs=1)


def test_the_peak_may_be_in_another_phase_than_in_the_probes() -> None:
    grid = planes({"loss": (100, 1000, 0, 0), "optimizer": (0, 0, 300, 0)})
    assert all(peaks["loss"] > peaks["optimizer"] for peaks in grid.values())
    found = predict(grid, rows=2, depth=40, outside=NO_WORKSPACE)
    assert (found.phase, found.active) == ("optimizer", 12_000)


def test_phases_are_in_the_order_of_the_probes() -> None:
    names = [f"backward {i}" for i in range(20)]
    assert list(predict(planes(dict.fromkeys(names, (1, 0, 0, 0))), 2, 2).phases) == names


def test_probes_that_are_no_grid_are_refused() -> None:
    grid = planes({"x": (1, 1, 1, 1)})
    del grid[(3, 4)]
    with pytest.raises(ValueError, match="give one or two numbers of rows times one or two depths"):
        at_size(grid, 2, 2)


def test_offload_takes_away_what_it_moves_and_adds_copies() -> None:
    grid = planes({"loss": (1000, 0, 0, 0)})
    assert predict(grid, 2, 2, outside=NO_WORKSPACE).active == 1000
    assert predict(grid, 2, 2, offload_copies=7, outside=NO_WORKSPACE).active == 1000 - 100 + 7


def test_scratch_counts_where_the_loss_is_computed() -> None:
    grid = planes({"loss": (1000, 0, 0, 0), "optimizer": (1500, 0, 0, 0)})
    assert predict(grid, 2, 2, scratch=100, outside=NO_WORKSPACE).active == 1500
    assert predict(grid, 2, 2, scratch=600).phase == "loss"


def test_sharding_over_more_ranks_shrinks_what_is_sharded() -> None:
    grid = planes({"optimizer": (1000, 0, 0, 0)})
    found = resharded(grid, 4, 8)
    assert found[(2, 2)]["optimizer"] == (950, 50)
    assert resharded(found, 8, 4) == grid


@pytest.mark.parametrize(
    ("capacity", "verdict"), [(70, Verdict.FIT), (60, Verdict.MAYBE), (50, Verdict.MAYBE), (40, Verdict.NO)]
)
def test_only_what_cannot_fit_is_a_no(capacity: float, verdict: Verdict) -> None:
    assert Prediction(55, "loss", {}, low=45, high=65).verdict(capacity) is verdict


def test_the_band_holds_what_lies_outside_of_tensors() -> None:
    grid = planes({"loss": (50 * GIB, 0, 0, 0)})
    outside = Outside(context=0.5, workspace=0.1, communication=0.6, fragmentation=0.06, below=0.1, above=0.05)
    one, many = predict(grid, 2, 2, outside=outside), predict(grid, 2, 2, ranks=8, outside=outside)
    assert one.active / GIB == pytest.approx(50.1)
    assert one.high / GIB == pytest.approx(50.1 * 1.05 + min(50.1 * 0.06, 5) + 0.5)
    assert many.high - one.high == pytest.approx(0.6 * GIB)
    assert one.low / GIB == pytest.approx(50.1 * 0.9 + 0.4)


@given(st.integers(1, 200), st.integers(1, 8))
def test_probed_depths_are_small_and_of_the_same_kind(depth: int, period: int) -> None:
    pair = depth_pair(depth, period)
    assert all(d <= min(depth, 3 * period + 1) for d in pair) or pair == (depth,)
    assert all((depth - d) % period == 0 for d in pair)
    assert len(pair) == 1 or pair[1] - pair[0] == period
