"""The benchmarks of memory modes and of overlap run on a CPU as far as it goes, and say what it cannot do."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ("--device", "cpu", "--shape", "tiny")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_a_table_of_modes_with_equal_losses_and_what_was_left_out(script, capsys):
    modes = script("memory_modes")
    assert modes.main([*TINY, "--modes", "none", "full", "--steps", "2", "--warmup", "1"]) == 0
    *_, none, full = capsys.readouterr().out.splitlines()
    assert none.split()[5] == full.split()[5], "recomputation changes no loss"
    assert modes.main([*TINY, "--modes", "none", "--budget", "1"]) == 1
    assert "not run: 1 s left of --budget 1" in capsys.readouterr().out


def test_modes_that_take_a_gpu_are_refused_on_a_cpu(script, capsys):
    with pytest.raises(SystemExit):
        script("memory_modes").main([*TINY, "--modes", "offload"])
    assert "--modes offload: on cpu there are none, every-2, save-ops, full" in capsys.readouterr().err


def test_overlap_without_nccl_runs_and_says_why_nothing_is_measured(script, capsys, monkeypatch):
    overlap = script("overlap")
    monkeypatch.setattr(overlap, "WARMUP", 1)
    monkeypatch.setattr(overlap, "STEPS", 2)
    assert overlap.main([*TINY, "--devices", "1", "--variants", "fsdp"]) == 0
    why, *_, row = capsys.readouterr().out.splitlines()
    assert why.startswith("nothing is measured: gloo's collectives are no kernels")
    assert row.split()[0] == "fsdp"
    assert overlap.why_nothing(overlap.parse(["--devices", "1"])) == "--devices 1: one GPU communicates with none"
