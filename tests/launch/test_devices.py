"""Jobs at once have devices that no other job has."""

import sys
from pathlib import Path

import pytest

from lightning_fms.launch import devices as launch_devices
from lightning_fms.launch.devices import Pool, count_gpus, devices_of, visible_gpus
from lightning_fms.launch.jobs import Record
from lightning_fms.launch.sweep import Sweep, Task


@pytest.mark.parametrize(
    ("asked", "there", "means"),
    [(2, 4, 2), ("3", 4, 3), ("auto", 4, 4), (-1, 4, 4), ("auto", 0, 1), ([0, 2], 4, [0, 2]), ("0,2", 4, [0, 2]), ("1,", 4, [1])],
)  # fmt: skip
def test_what_a_number_of_devices_means(asked: object, there: int, means: object) -> None:
    assert devices_of(asked, there) == means


@pytest.mark.parametrize("asked", [0, "two", "", -3, [0.5]])
def test_what_is_no_number_of_devices(asked: object) -> None:
    with pytest.raises(ValueError, match=r"trainer\.devices="):
        devices_of(asked, 4)


def test_devices_are_had_by_one_job_at_a_time() -> None:
    pool = Pool(["4", "5", "6"], None)
    assert pool.take(2) == [0, 1]
    assert pool.take(2) is None
    assert pool.take([0, 2]) is None
    assert pool.take([2]) == [2]
    pool.give_back([0, 1])
    assert pool.take(1) == [0]
    assert pool.visible([0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert not pool.fits(4)
    assert not pool.fits([3])


def test_on_a_cpu_jobs_share_it_one_at_a_time_unless_more_are_asked_for() -> None:
    assert [Pool([], None).take(3), Pool([], None).visible([])] == [[], {}]
    pool = Pool([], 2)
    assert [pool.take(1), pool.take(1), pool.take(1)] == [[], [], None]


def test_a_machine_without_gpus_has_none(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_gpus_are_counted_by_a_process_that_may_fail_or_hang(monkeypatch, capsys) -> None:
    for script, count in (("print(3)", 3), ("print(3); raise SystemExit(1)", 0), ("", 0)):
        monkeypatch.setattr(launch_devices, "_COUNT", script)
        assert count_gpus() == count
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(launch_devices, "_COUNT", "import time; time.sleep(600)")
    monkeypatch.setattr(launch_devices, "_COUNT_S", 0.1)
    monkeypatch.setattr(launch_devices, "_KILLED_S", 60.0)
    assert count_gpus() == 0
    assert capsys.readouterr().err == "GPUs could not be counted in 0.1 s: going on as if there were none\n"


# Ends only when another job runs at the same time.
TOGETHER = """
import json, os, sys, time
from pathlib import Path
number = os.environ["LIGHTNING_FMS_JOB"]
Path(f"seen.{number}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
end = time.monotonic() + 60
while len(list(Path().glob("seen.*"))) < 2:
    assert time.monotonic() < end
    time.sleep(0.02)
Path(sys.argv[1]).mkdir(exist_ok=True)
Path(sys.argv[1], "result.json").write_text(json.dumps({"steps": 1, "seconds": 1, "metrics": {}, "objective": None}))
"""


def test_jobs_run_at_once_on_devices_of_their_own(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    record = Record(tmp_path / "sweep", [])
    tasks = []
    for seed, devices in ((0, 2), (1, [2, 3]), (2, 5), (3, 1)):
        job = record.job([f"seed={seed}"])
        tasks.append(Task(job, (sys.executable, "-c", TOGETHER, str(record.run(job))), devices))
    Sweep(record, Pool(["7", "5", "3", "1"], None)).run(tasks)
    assert [job.status for job in record.jobs] == ["done", "done", "failed", "done"]
    assert record.jobs[2].reason == "wants trainer.devices=5; there are 4"
    assert [Path(f"seen.{number}").read_text() for number in (0, 1)] == ["7,5", "3,1"]
    assert "job 000 of 4, seed=0: starts\njob 001 of 4, seed=1: starts" in capsys.readouterr().out
