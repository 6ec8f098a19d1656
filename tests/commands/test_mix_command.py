"""`fms-data mix`: the arithmetic of a mixture, and that it is what a run does."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_fms.commands.mix import Mixture
from lightning_fms.data import StreamLoader
from tests.commands.calls import call, refused, write_jsonl


def test_a_schedule_epochs_and_a_source_that_runs_out() -> None:
    mixture = Mixture([(0, {"a": 0.5, "b": 0.5}), (100, {"a": 0.9, "b": 0.1})], {"a": 40, "b": 1000}, {"a": 3})
    found, ends = mixture.consumed([50, 100, 110, 200])
    assert found == [{"a": 25, "b": 25}, {"a": 50, "b": 50}, {"a": 59, "b": 51}, pytest.approx({"a": 120, "b": 80})]
    assert ends["a"] == pytest.approx([80, 100 + 30 / 0.9, 100 + 70 / 0.9])
    assert ends["b"] == []
    assert mixture.shares(200, found[-1]) == {"b": 1}


def test_many_epochs_and_the_end_of_all() -> None:
    mixture = Mixture([(0, {"a": 1.0, "b": 0.0})], {"a": 10, "b": 10}, {})
    assert mixture.consumed([1e6]) == ([{"a": 1e6, "b": 0}], {"a": [10, 20, 30], "b": []})
    with pytest.raises(ValueError, match="end the data after 20 tokens"):
        Mixture([(0, {"a": 1.0})], {"a": 10}, {"a": 2}).consumed([15, 30])


def test_it_is_what_a_run_consumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"a": write_jsonl(tmp_path / "a", 40), "b": write_jsonl(tmp_path / "b", 200)}
    words = [f"{name}={path}:{weight}" for (name, path), weight in zip(paths.items(), (3, 1), strict=True)]
    tokens = 64 * 8 * 200
    plot = tmp_path / "mix.png"
    options = ("--tokens", tokens, "--max-epochs", "a=4", "--plot", plot, "--at", "10k,2e4")
    assert call("mix", "--sources", *words, *options) == 0
    said = capsys.readouterr().out
    assert plot.stat().st_size > 10_000
    loader = StreamLoader(
        {name: {"path": path, "weight": w} for (name, path), w in zip(paths.items(), (3, 1), strict=True)},
        seq_len=64, global_batch_size=8, max_epochs={"a": 4},
    )  # fmt: skip
    batches = iter(loader)
    for _ in range(200):
        next(batches)
    report = loader.mix_report()
    shown = {line.split()[0]: line.split() for line in said.partition(f"after {tokens:,} tokens")[2].splitlines()[2:4]}
    assert float(shown["a"][4]) == 4
    for name, entry in report.items():
        assert int(shown[name][1].replace(",", "")) == pytest.approx(entry["tokens"], rel=0.02)
    assert [line for line in said.splitlines() if line.startswith("after")] == [
        "after 10,000 tokens", "after 20,000 tokens", f"after {tokens:,} tokens",
    ]  # fmt: skip


def test_a_run_with_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {
        "_target_": "lightning_fms.data.RescalableDataModule", "seq_len": 10, "global_batch_size": 5,
        "sources": {name: str(write_jsonl(tmp_path / name, 40)) for name in "ab"},
        "mixture": {0: {"a": 1, "b": 0}, 100: {"a": 1, "b": 1}},
    }  # fmt: skip
    OmegaConf.save(OmegaConf.create({"paths": {"run": "x"}, "data": data}), tmp_path / "config.yaml")
    (tmp_path / "run.yaml").write_text("attempts: []\n")
    assert call("mix", "--run", tmp_path, "--tokens", "2000", "--at", "1000") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["after", "1,000", "tokens,", "20", "steps"]
    assert [line[1:3] for line in lines[2:4]] == [["1,000", "100.0%"], ["0", "0.0%"]]
    assert [line[1:3] for line in lines[6:8]] == [["1,500", "75.0%"], ["500", "25.0%"]]
    assert call("inspect", "--run", tmp_path) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")] == ["a", "b"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_jsonl(tmp_path / "in", 10)
    one = ("--sources", f"a={data}", "--tokens", 100)
    assert "mix takes --sources, or --run RUN_FOLDER" in refused(capsys, 2, "mix", "--tokens", 1)
    assert "--sources a: give NAME=PATH or NAME=PATH:WEIGHT" in refused(
        capsys, 2, "mix", "--sources", "a", "--tokens", 1
    )
    assert "two have the same name" in refused(capsys, 2, "mix", "--sources", f"a={data}", f"a={data}", "--tokens", 1)
    assert "--at 200: lies beyond --tokens 100" in refused(capsys, 2, "mix", *one, "--at", "200")
    assert "max_epochs={'a': 1} limits every source" in refused(capsys, 2, "mix", *one, "--max-epochs", "a=1")
    assert "--max-epochs a: give NAME=N" in refused(capsys, 2, "mix", *one, "--max-epochs", "a")
    assert "mix.xyz: cannot be drawn" in refused(capsys, 2, "mix", *one, "--plot", tmp_path / "mix.xyz")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "needs matplotlib; pip install 'lightning_fms[plot]'" in refused(capsys, 2, "mix", *one, "--plot", "a.png")
