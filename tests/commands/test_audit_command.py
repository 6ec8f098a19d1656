"""`fms-data audit`: the documents of a step are found from a run's folder, also where its batches changed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightning_fms.commands.runs import open_run
from lightning_fms.data.sources import open_source
from tests.app.app_runs import SHORT
from tests.app.app_runs import call as train
from tests.commands.calls import call, refused
from tests.data.chains import Phase, run_phase, write_jsonl

SEQ_LEN = 40


def write_run(folder: Path, batch: int, phases: tuple[Phase, ...], every: int, **data: Any) -> dict[int, tuple]:
    """A run's folder as its trail leaves it; return the rows that it saw."""
    options = {"seq_len": SEQ_LEN, "num_streams": 6, "shuffle_window": 5, **data}
    (folder / "data_trail").mkdir(parents=True)
    (folder / "run.yaml").write_text("attempts: []\n")
    target = {"_target_": "lightning_fms.data.RescalableDataModule", "global_batch_size": batch, "num_workers": 2}
    config = {"paths": {"run": "elsewhere"}, "seed": 0, "data": {**target, **options}}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    rows: dict[int, tuple] = {}
    state, row, step = None, 0, 0
    for phase in phases:
        for steps in [every] * (phase.steps // every) + ([phase.steps % every] if phase.steps % every else []):
            _keep(folder, step, state or run_phase(options, Phase(1, phase.batch, None, 0), None, 0)[1])
            part = Phase(phase.world, phase.batch, phase.micro, steps)
            found, state = run_phase(options, part, state, row)
            rows |= found
            row, step = row + steps * phase.batch, step + steps
    _keep(folder, step, state)
    return rows


def _keep(folder: Path, step: int, state: Any) -> None:
    torch.save(state, folder / "data_trail" / f"step-{step}.pt")


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    return {"p": str(write_jsonl(tmp_path / "p", "p", 50)), "q": str(write_jsonl(tmp_path / "q", "q", 50))}


def listed(capsys: pytest.CaptureFixture[str], run: Path, step: int) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert call("audit", run, "--step", step, "--jsonl") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check(rows: dict[int, tuple], wanted: range, entries: list[dict[str, Any]], sources: dict[str, str]) -> None:
    made: dict[int, list[int]] = {row: [] for row in wanted}
    for entry in entries:
        source = open_source(sources[entry["source"]])
        document = source.read(source.listing.names.index(entry["file"]), entry["start"], entry["ref"])
        assert isinstance(document, str)
        made[entry["row"]] += [*document.encode(), 256][entry["first_token"] : entry["first_token"] + entry["tokens"]]
    assert made == {row: np.frombuffer(rows[row][0], np.int64).tolist() for row in wanted}


def test_d12_every_step_of_a_run_whose_batch_changed(
    sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    rows = write_run(run, 3, (Phase(2, 4, None, 5), Phase(1, 3, 2, 4)), 3, sources=sources)  # kept: 0 3 5 8 9
    for step in range(9):
        first = 4 * step if step < 5 else 20 + 3 * (step - 5)
        check(rows, range(first, first + (4 if step < 5 else 3)), listed(capsys, run, step), sources)
    (run / "data_trail" / "step-9.pt").unlink()
    check(rows, range(29, 32), listed(capsys, run, 8), sources)
    assert call("audit", run, "--step", 8) == 0
    said = capsys.readouterr().err
    assert "3 a step by the config: no state after step 8 says how many, or that the run came so far" in said
    (run / "data_trail" / "step-5.pt").unlink()
    said = refused(capsys, 2, "audit", run, "--step", 4)
    assert "steps 3 to 8 had 17 rows together (step-3.pt, step-8.pt): global_batch_size changed in between" in said


def test_a_source_that_was_left_out_since_is_named_again(
    sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    rows = write_run(run, 4, (Phase(1, 4, None, 6),), 3, sources=sources)
    config = OmegaConf.load(run / "config.yaml")
    del config.data.sources["q"]
    OmegaConf.save(config, run / "config.yaml")
    said = refused(capsys, 2, "audit", run, "--step", 4)
    assert "draws from source 'q', and there are ['p']; name its files again (fms-data: --source)" in said
    assert "--source q: give it as NAME=PATH" in refused(capsys, 2, "audit", run, "--step", 4, "--source", "q")
    assert call("audit", run, "--step", 4, "--jsonl", "--source", f"q={sources['q']}") == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check(rows, range(16, 20), entries, sources)


def test_a_state_that_a_restart_gave_up_says_nothing(
    sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    rows = write_run(run, 2, (Phase(1, 4, None, 4),), 2, sources=sources)
    for step, written in ((0, 1), (4, 2), (2, 3)):
        os.utime(run / "data_trail" / f"step-{step}.pt", (written, written))
    check(rows, range(8, 10), listed(capsys, run, 2), sources)


def test_settings_of_that_time_decide(
    sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    mixture = {0: {"p": 3, "q": 1}, 9: {"p": 1, "q": 1}}
    rows = write_run(run, 4, (Phase(1, 4, None, 6),), 2, sources=sources, mixture=mixture, max_document_tokens=20)
    config = OmegaConf.load(run / "config.yaml")
    config.data.update(
        seq_len=64, shuffle_window=9, packing="best_fit", max_document_tokens=None, mixture={"p": 1, "q": 9}
    )
    OmegaConf.save(config, run / "config.yaml")
    capsys.readouterr()
    assert call("audit", run, "--step", 5, "--jsonl") == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {entry["row"] for entry in entries} == set(range(20, 24))
    assert sum(entry["tokens"] for entry in entries) == 4 * SEQ_LEN
    made: dict[int, list[int]] = {}
    for entry in entries:
        source = open_source(sources[entry["source"]])
        document = source.read(source.listing.names.index(entry["file"]), entry["start"], entry["ref"])
        assert isinstance(document, str)
        tokens = [*document.encode()[:20], 256]
        made.setdefault(entry["row"], []).extend(tokens[entry["first_token"] : entry["first_token"] + entry["tokens"]])
    assert made == {row: np.frombuffer(rows[row][0], np.int64).tolist() for row in range(20, 24)}


def test_the_table(sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, 2, (Phase(1, 2, None, 2),), 2, sources=sources)
    assert call("audit", run, "--step", 1, "--text") == 0
    said = capsys.readouterr()
    assert f"step 1: rows 2 to 3 (2 a step), from {run}/data_trail/step-0.pt" in said.err
    head, *lines = said.out.splitlines()
    assert head.split() == ["row", "source", "epoch", "file", "document", "tokens", "text"]
    for line in lines:
        row, source, epoch, file, unit, _, tokens, text = line.split()
        assert (row in "23", epoch, unit, file) == (True, "0", "byte", f"{source}-{file[2]}.jsonl")
        assert text.startswith(source)
        assert ".." in tokens


def test_mistakes(sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_run(run, 2, (Phase(1, 2, None, 2),), 2, sources=sources)
    assert "is no run, which holds run.yaml and config.yaml" in refused(capsys, 2, "audit", tmp_path, "--step", 1)
    assert "--step -1: steps are counted from 0" in refused(capsys, 2, "audit", run, "--step", -1)
    config = OmegaConf.load(run / "config.yaml")
    OmegaConf.save(OmegaConf.merge(config, {"data": {"sources": {"p": "nowhere"}}}), run / "config.yaml")
    assert "nowhere: no such file or folder" in refused(capsys, 2, "audit", run, "--step", 1)
    config.data.sources = {"p": sources["p"]}
    OmegaConf.save(config, run / "config.yaml")
    assert "the state draws from source 'q', and there are ['p']" in refused(capsys, 2, "audit", run, "--step", 1)
    for file in (run / "data_trail").iterdir():
        file.unlink()
    assert "holds no state of the data at or before step 1" in refused(capsys, 2, "audit", run, "--step", 1)
    (run / "config.yaml").write_text("[1]")
    assert "config.yaml: is no config of a run" in refused(capsys, 2, "audit", run, "--step", 1)


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_app_is_audited_from_its_trail_and_from_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(monkeypatch, *SHORT, f"paths.root={tmp_path}", "trainer.devices=1", "trainer.accelerator=cpu") == 0
    run = tmp_path / "quickstart" / "001"
    entries = listed(capsys, run, 3)
    assert {entry["row"] for entry in entries} == set(range(12, 16))
    assert {entry["source"] for entry in entries} <= {"prose", "code"}
    for file in (run / "data_trail").iterdir():
        file.unlink()
    assert open_run(run)[0].paths.run == str(run)
    assert listed(capsys, run, 3) == entries
    assert call("audit", run, "--step", 3, "--text") == 0
    assert "checkpoints/step-2" in capsys.readouterr().err
