"""A sweep: every way in which a job can end is a row, and a sweep that is killed goes on where it was."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import PATIENCE_S, assert_gone, is_running
from sweep_app import task
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fms.launch.jobs import Job, Record, newest_sweep, read_record
from lightning_fms.launch.result import Result, write_result
from lightning_fms.train import run_app

APP = str(Path(__file__).with_name("sweep_app.py"))
PLUGINS = str(Path(__file__).with_name("plugins"))
ENDS = "name=good,error,memory,exit,killed,nothing"


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", PLUGINS, prepend=os.pathsep)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def sweep(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, APP, *words], capture_output=True, text=True, timeout=240)


def starts() -> list[list[str]]:
    """Name, learning rate, rank, pid, words of every start so far."""
    return [line.split("|") for line in Path("starts").read_text().splitlines()] if Path("starts").exists() else []


def only_sweep() -> Record:
    record = read_record(next(Path().glob("runs/*/sweeps/*")))
    assert record is not None
    return record


def test_every_way_to_end_is_a_row_and_the_sweep_goes_to_its_end() -> None:
    done = sweep("-m", ENDS, "optimizer.lr=0.5", "trainer.accelerator=cpu")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    record = only_sweep()
    assert [(job.overrides[0], job.status, job.reason) for job in record.jobs] == [
        ("name=good", "done", ""),
        ("name=error", "failed", "rank 0 failed with exit code 1: RuntimeError: some mistake"),
        (
            "name=memory",
            "failed",
            "out of memory on rank 0: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        ("name=exit", "failed", "rank 0 failed with exit code 3: rank 0 of 1 trains exit in " + str(Path.cwd())),
        ("name=killed", "failed", "rank 0 was ended by SIGKILL, by hand or by the kernel for want of memory"),
        ("name=nothing", "failed", "ended without a result"),
    ]
    out = done.stdout
    for shown in ("job 000 of 6, name=good: starts", "rank 0 of 1 trains good", "name=good: done after"):
        assert shown in out
    shown = [line.split() for line in out.splitlines() if line.startswith(("job  ", "000  ", "004  "))]
    assert shown[0] == ["job", "name", "status", "time", "loss", "tokens/s"]
    assert [word for word in shown[1] if ":" not in word] == ["000", "good", "done", "0.0400", "7"]
    assert shown[2][:3] == ["004", "killed", "failed"]
    assert f"best: job 000, name=good: loss 0.0400, in {record.folder}/000" in out
    rows = list(csv.DictReader((record.folder / "results.csv").read_text().splitlines()))
    assert [(row["name"], row["status"], row["accuracy"]) for row in rows[:2]] == [
        ("good", "done", "0.96"),
        ("error", "failed", ""),
    ]

    again = sweep("-m", "resume=auto")
    assert again.returncode == 1
    assert len(starts()) == 6
    assert "job 003 of 6, name=exit: failed before" in again.stdout
    assert sweep(f"resume={record.folder}", "hydra.launcher.retry_failed=true").returncode == 1
    assert sorted(start[0] for start in starts()[6:]) == sorted(["error", "memory", "exit", "killed", "nothing"])


def test_jobs_are_sessions_of_hparams_in_the_folder_of_the_sweep() -> None:
    assert sweep("-m", "name=good,error", "optimizer.lr=0.1", "trainer.accelerator=cpu", "seed=3").returncode == 1
    folder = only_sweep().folder / "hparams"
    good, error = (EventAccumulator(str(folder / name)).Reload() for name in ("000", "001"))
    assert good.Scalars("loss")[0].value == good.Scalars("objective")[0].value == pytest.approx(0.04)
    assert error.Tags()["scalars"] == []
    for found, status in ((good, 1), (error, 2)):  # Success, failure.
        told = found.summary_metadata
        start = HParamsPluginData.FromString(
            told["_hparams_/session_start_info"].plugin_data.content
        ).session_start_info
        end = HParamsPluginData.FromString(told["_hparams_/session_end_info"].plugin_data.content).session_end_info
        assert start.hparams["optimizer.lr"].number_value == 0.1
        assert start.hparams["trainer.accelerator"].string_value == "cpu"
        assert start.hparams["seed"].number_value == 3
        assert end.status == status


def test_every_job_has_ranks_of_its_own_with_the_same_folder_and_overrides() -> None:
    done = sweep("-m", "trainer.devices=2,1,[0]", "trainer.accelerator=cpu", "+random=1", "hydra.job.name=mine")
    assert done.returncode == 0, done.stdout
    by_job: dict[str, set[str]] = {}
    for _, _, rank, _, words in starts():
        by_job.setdefault(words, set()).add(rank)
    assert [len(ranks) for ranks in by_job.values()] == [2, 1, 1]
    for number, words in enumerate(by_job):
        assert "hydra.job.name=mine" in words
        assert f"paths.run={only_sweep().folder}/{number:03}" in words
    logs = only_sweep().folder / "logs"
    assert (logs / "000.rank-1.log").read_text() == f"rank 1 of 2 trains train in {Path.cwd()}\n"


def test_more_is_better_where_the_config_says_so() -> None:
    assert sweep("-m", "optimizer.lr=0.5,0.2", "trainer.accelerator=cpu", "objective_mode=max").returncode == 0
    best = only_sweep().best()
    assert best is not None
    assert best.overrides[0] == "optimizer.lr=0.5"


def test_a_job_that_takes_too_long_has_failed() -> None:
    limit = ("hydra.launcher.timeout_s=4", "hydra.launcher.grace_s=0.2")
    assert sweep("-m", "name=hangs", "trainer.accelerator=cpu", *limit).returncode == 1
    assert only_sweep().jobs[0].reason == "took longer than 4 s"
    if started := [int(start[3]) for start in starts()]:  # It may have been too slow for that.
        assert_gone(started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_nothing_running_and_goes_on_where_it_was(number: int) -> None:
    words = (
        "-m",
        "experiment=quickstart",
        "name=good,hangs,error",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
        "hydra.launcher.grace_s=1",
    )
    first = subprocess.Popen([sys.executable, APP, *words], stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + PATIENCE_S
    while len(starts()) < 4 or not list(Path().glob("runs/*/sweeps/*/001/run.yaml")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert all(is_running(int(start[3])) for start in starts()[2:])
    first.send_signal(number)
    out, _ = first.communicate(timeout=120)
    assert first.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert_gone([int(start[3]) for start in starts()])
    folder = only_sweep().folder
    assert [job.status for job in only_sweep().jobs] == ["done", "running", "waiting"]
    if number != signal.SIGKILL:
        assert f"stopped; go on with: fms-train -m resume={folder}" in out
        rows = [line.split()[2] for line in out.splitlines() if line.startswith(("000 ", "001 ", "002 "))]
        assert rows == ["done", "stopped", "waiting"]
    Path("go").touch()
    again = sweep("-m", f"resume={folder}")
    assert again.returncode == 1, again.stderr
    assert [job.status for job in only_sweep().jobs] == ["done", "done", "failed"]
    assert [(start[0], "resume=auto" in start[4]) for start in starts()[4:]] == [("hangs", True)] * 2 + [
        ("error", False)
    ] * 2


def test_a_job_that_ended_while_nobody_looked_is_done() -> None:
    assert sweep("-m", "name=good", "trainer.accelerator=cpu").returncode == 0
    record = only_sweep()
    record.jobs[0].status, record.jobs[0].result = "running", None
    record.write()
    assert sweep("-m", "resume=auto").returncode == 0
    assert len(starts()) == 1
    assert only_sweep().jobs[0].value == pytest.approx(0.09, abs=1e-3)


def test_a_search_is_told_what_jobs_came_to() -> None:
    done = sweep("-m", "hydra/sweeper=climbing", "trainer.accelerator=cpu")
    assert done.returncode == 0, done.stderr
    rates = [job.overrides[-1].partition("=")[2] for job in only_sweep().jobs]
    assert rates == ["0.2", "0.05", "0.3", "0.15", "0.4", "0.25"]
    assert "best: job 002, optimizer.lr=0.3: loss 0.0000" in done.stdout
    assert done.stdout.count("best: ") == 1


@pytest.mark.skipif(find_spec("optuna") is None, reason="the extra optuna is not installed")
def test_optuna_searches_and_a_failed_job_does_not_end_it() -> None:
    search = (
        "hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_trials=5",
        "hydra.sweeper.n_jobs=1", "hydra.sweeper.max_failure_rate=1.0", "hydra.sweeper.study_name=s",
        "hydra.sweeper.direction=minimize", "hydra.sweeper.storage=sqlite:///study.db",
    )  # fmt: skip
    done = sweep(
        "-m", *search, "trainer.accelerator=cpu", "optimizer.lr=interval(0.1, 0.5)", "name=choice(good, error)"
    )
    assert len(starts()) == 5
    record = only_sweep()
    assert {job.status for job in record.jobs} == {"done", "failed"}
    best = record.best()
    assert best is not None
    found = json.loads(json.dumps(best.overrides))
    assert f"best: job {best.number:03}" in done.stdout
    results = (record.folder / "optimization_results.yaml").read_text()
    assert next(word for word in found if word.startswith("optimizer.lr")).partition("=")[2] in results


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (("paths.run=x",), {}, "paths.run=x: jobs would share a folder; give hydra.sweep.dir=<folder>"),
        (("trainer.num_nodes=2",), {}, "trainer.num_nodes=2: this launcher has one machine; use hydra/launcher=submitit_slurm"),
        (("hydra.sweeper.max_batch_size=2",), {}, "hydra.sweeper.max_batch_size=2: a job that fails would end the sweep"),
        (("hydra.launcher.jobs=0",), {}, "hydra.launcher.jobs=0: give at least 1"),
        (("hydra.launcher.timeout_s=0",), {}, "hydra.launcher.timeout_s=0.0: give a number of seconds above 0"),
        ((), {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}, "-m in each of 4 processes: start it once, without torchrun"),
        ((), {"SLURM_STEP_NUM_TASKS": "8"}, "-m in each of 8 processes"),
        (("trainer.devices=none",), {}, "trainer.devices=none: give a number of devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_refused(words, environment, said, monkeypatch, capfd) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [APP, "-m", "seed=1,2", "trainer.accelerator=cpu", *words])
    with pytest.raises(SystemExit, match="2"):
        run_app(task)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert not starts()


def test_resuming_what_is_no_sweep_is_refused() -> None:
    Path("runs/a/sweeps/now").mkdir(parents=True)
    assert "no sweep under runs/; leave resume=auto out to start one" in sweep("-m", "resume=auto").stderr
    Path("runs/a/sweeps/now/sweep.json").write_text("{")
    assert "sweep.json: is no record of a sweep" in sweep("-m", "resume=runs/a/sweeps/now").stderr


def test_a_job_is_known_by_its_overrides(tmp_path: Path) -> None:
    record = Record(tmp_path / "a/sweeps/2026", ["x=1,2"])
    one, two = record.job(["x=1"]), record.job(["x=2"])
    assert (one.number, two.number, record.job(["x=2"])) == (0, 1, two)
    both = record.job(["x=3", "name=a"])
    assert record.job(["name=a", "x=3"]) is both  # a word that is typed again comes last
    record.jobs.remove(both)
    record.write()
    assert read_record(record.folder) == record
    assert newest_sweep(tmp_path) == record.folder
    assert Job(0, ("a=1",)).value is None
    assert os.listdir(record.folder) == ["sweep.json"]


@pytest.mark.parametrize(("objective", "status"), [("loss", "done"), (None, "running")])
def test_a_running_job_with_a_result_but_no_objective_is_not_done(objective, status, tmp_path: Path) -> None:
    record = Record(tmp_path / "sweep", [])
    job = record.job(["x=1"])
    job.status = "running"
    record.write()
    record.run(job).mkdir()
    # What a run leaves that logged no such metric as its config asks for, before it fails of that.
    write_result(record.run(job), Result(1, 1.0, {"loss": 2.0}, objective))
    read = read_record(record.folder)
    assert read is not None
    assert read.jobs[0].status == status
