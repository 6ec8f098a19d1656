"""The benchmark on one GPU, run on a CPU with a tiny model: it works, and both sides of its table do the same work."""

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = ("--shape", "tiny", "--device", "cpu", "--steps", "4", "--warmup", "1", "--least", "1")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # it runs as a script, and finds its neighbours in its folder
    return importlib.import_module("gpu")


def test_the_peer_trains_on_the_same_weights_and_batches_as_ours(gpu, tmp_path, capsys):
    results = tmp_path / "results.json"
    assert gpu.main([*TINY, "--profile", "--variants", "bf16", "peer:plain", "--out", str(results)]) == 0
    ours, peer = json.loads(results.read_text())["rows"]
    assert peer["losses"] == pytest.approx(ours["losses"], abs=2e-3)  # bf16, rounded in other places
    assert len(set(peer["losses"])) == 4
    output = capsys.readouterr().out
    for row in (ours, peer):
        assert f"tiny  {row['variant']}" in output
        assert f"tiny {row['variant']}: device busy" in output


def test_an_unknown_option_is_refused_before_anything_runs(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--variants", "peer:kernels"])
    assert "kernels is none of plain, compile" in capsys.readouterr().err
