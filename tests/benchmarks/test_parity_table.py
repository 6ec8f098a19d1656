"""The identical-loss proof says what agrees, and sees what does not."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parity(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("parity")


def test_one_process_is_stock_lightning_to_the_bit(parity, capsys):
    assert parity.main(["--worlds", "1"]) == 0
    head, stock, ours, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["processes", "mesh"]
    assert stock.split()[3:] == ours.split()[6:], "the same losses, norms and verdict"
    assert ours.endswith("0.0e+00          0.0e+00  same")


@pytest.mark.parametrize("wrong", [2.01, float("nan")])
def test_another_loss_or_norm_is_seen(parity, wrong: float):
    right = parity.Curve([2.0] * parity.STEPS, [1.0] * parity.STEPS)
    for curve in (
        parity.Curve([2.0, 2.0, 2.0, 2.0, wrong], right.norms),
        parity.Curve(right.losses, [wrong / 2, *right.norms[1:]]),
    ):
        line, good = parity.line_of(2, "mesh", curve, right, parity.TOLERANCE["32-true"])
        assert (line[-1], good) == ("DIFFERS", False)


def test_the_meshes_of_a_world_are_all_that_fit(parity):
    assert [str(shape) for shape in parity.meshes(4)] == [
        "replicate 1 x shard 4",
        "replicate 2 x shard 2",
        "replicate 1 x shard 2 x tensor 2",
        "replicate 2 x shard 1 x tensor 2",
    ]
    assert "replicate 2 x shard 2 x tensor 2" in map(str, parity.meshes(8))
