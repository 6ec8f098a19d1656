"""Run folders: numbered, never mixed, found again, and gone if nothing was trained in them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from lightning_fms.app import closing_lines
from lightning_fms.config_check import ConfigError
from lightning_fms.distributed import checkpoint
from lightning_fms.distributed.commit import CheckpointError
from lightning_fms.launch.process_group import JOB
from lightning_fms.run_folder import (
    RECORD,
    RESERVED,
    attempts,
    discard,
    locate,
    newest_checkpoint,
    newest_run,
    numbered,
    reserve,
    reserve_given,
    saved,
)


def make_run(root: Path, name: str, started: str, *steps: int) -> Path:
    run = reserve(root, name).folder
    record = {"attempts": [{"started": started, "overrides": [f"name={name}"]}]}
    OmegaConf.save(OmegaConf.create(record), run / RECORD)
    for step in steps:
        (run / "checkpoints").mkdir(exist_ok=True)
        torch.save({"weight": torch.ones(1000)}, run / "checkpoints" / f"step-{step}.ckpt")
    return run


def test_every_reservation_is_a_folder_of_its_own_also_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: reserve(tmp_path, "run"), range(16)))
    assert sorted(reservation.folder.name for reservation in made) == [f"{number:03}" for number in range(1, 17)]
    assert reserve(tmp_path, "run").folder.name == "017"


def test_numbers_are_ordered_as_numbers_and_nothing_else_counts(tmp_path: Path) -> None:
    for name in ("002", "1000", "sweeps", "10"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert [path.name for path in numbered(tmp_path / "run")] == ["002", "10", "1000"]
    assert reserve(tmp_path, "run").folder.name == "1001"


def test_a_folder_without_training_is_removed_with_its_empty_parents(tmp_path: Path) -> None:
    kept = make_run(tmp_path / "runs", "a", "2026-01-01", 1)
    empty, other = reserve(tmp_path / "runs", "a"), reserve(tmp_path / "runs", "b")
    (empty.folder / "tensorboard").mkdir()
    for reservation in (empty, other):
        discard(reservation)
    assert kept.is_dir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert not empty.folder.exists()


@pytest.mark.parametrize("given", [False, True])
def test_a_snapshot_of_memory_outlives_a_start_without_training(given: bool, tmp_path: Path) -> None:
    if given:
        (tmp_path / "own").mkdir()
    reservation = reserve_given(tmp_path / "own", resume=False) if given else reserve(tmp_path, "run")
    for name in ("tensorboard", "memory"):
        (reservation.folder / name).mkdir()
    (reservation.folder / "memory" / "out-of-memory.rank-0.pickle").touch()
    discard(reservation)
    assert {path.name for path in reservation.folder.iterdir()} == {"memory", *([RESERVED] if given else [])}
    assert newest_run(tmp_path, "run") is None
    if not given:
        assert reserve(tmp_path, "run").folder.name == "002"


def test_the_last_lines_of_a_run_name_its_checkpoint_without_reading_it_again(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path, "a", "2026-01-01")
    checkpoint.save(run / "checkpoints" / "step-3.ckpt", {"model.w": torch.ones(3)}, {}, step=3)
    (run / "checkpoints" / "step-3.ckpt" / "state.pt").write_bytes(b"changed")  # who reads it passes it over
    monkeypatch.setenv(JOB, "0")
    trainer = SimpleNamespace(callback_metrics={}, global_step=3)
    lines = closing_lines(trainer, OmegaConf.create(), [], run, 1.0)  # type: ignore[arg-type]
    assert lines[-1] == f"  checkpoint  {run / 'checkpoints' / 'step-3.ckpt'}"


def test_the_newest_run_with_a_checkpoint_is_found_by_name_or_among_all(tmp_path: Path) -> None:
    assert newest_run(tmp_path, None) is None
    first = make_run(tmp_path, "a", "2026-01-03T00:00:00", 5, 20)
    make_run(tmp_path, "a", "2026-01-04T00:00:00")
    reserve(tmp_path, "a")
    other = make_run(tmp_path, "b", "2026-01-01T00:00:00", 1)
    assert newest_run(tmp_path, "a") == first
    assert saved(first)[0] == newest_checkpoint(first) == first / "checkpoints" / "step-20.ckpt"
    assert newest_run(tmp_path, "b") == other
    assert newest_run(tmp_path, None) == first
    assert newest_run(tmp_path, "c") is None
    assert attempts(first)[-1]["overrides"] == ["name=a"]


def test_a_folder_that_was_never_committed_is_no_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "2026-01-01")
    (run / "checkpoints" / "step-9.ckpt").mkdir(parents=True)
    assert newest_checkpoint(run) is None
    with pytest.raises(ValueError, match="no valid checkpoint"):
        locate(run)
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        locate(run / "checkpoints" / "step-9.ckpt")
    with pytest.raises(ValueError, match="does not exist"):
        locate(tmp_path / "nothing")


def test_a_folder_with_a_run_in_it_is_never_discarded(tmp_path: Path) -> None:
    reservation = reserve(tmp_path, "a")
    (reservation.folder / RECORD).touch()
    discard(reservation)
    assert reservation.folder.is_dir()


def test_parents_that_were_there_stay_although_they_are_empty(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    discard(reserve(tmp_path / "runs", "a"))
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]
    discard(reserve_given(tmp_path / "new" / "x" / "y", resume=False))
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_a_users_folder_is_taken_only_if_it_is_empty_and_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="exists and is no run; give a new or empty folder"):
            reserve_given(tmp_path, resume)
    with pytest.raises(ConfigError, match="is no folder"):
        reserve_given(tmp_path / "thesis.tex", resume=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    reservation = reserve_given(empty, resume=False)
    (empty / "checkpoints").mkdir()
    (empty / "notes.txt").write_text("written meanwhile")
    discard(reservation)
    assert (empty / "notes.txt").is_file()
    assert not (empty / "checkpoints").exists()
    (empty / "notes.txt").unlink()
    discard(reserve_given(empty, resume=True))
    assert list(empty.iterdir()) == []


def test_what_a_killed_start_left_is_taken_again_by_a_restart_only(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    reserve_given(folder, resume=True)
    (folder / "tensorboard").mkdir()
    with pytest.raises(ConfigError, match="resume=auto"):
        reserve_given(folder, resume=False)
    assert reserve_given(folder, resume=True).made == ()


def test_a_damaged_file_is_passed_over_for_the_next_older_one(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, "a", "2026-01-01", 1, 2, 3)
    one, two, three = (run / "checkpoints" / f"step-{step}.ckpt" for step in (1, 2, 3))
    whole = bytearray(two.read_bytes())
    three.write_bytes(whole[: len(whole) // 2])
    whole[whole.find(bytes(torch.ones(8).numpy().tobytes()))] ^= 1
    two.write_bytes(whole)
    assert newest_checkpoint(run) == one
    assert capsys.readouterr().out.count("passing over a damaged checkpoint") == 2
    one.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        newest_checkpoint(run)


@pytest.mark.parametrize("record", ["", "attempts: []", "a: [", "attempts: [{when: now}]", "text", "\0"])
def test_one_foreign_record_does_not_hide_the_other_runs(record: str, tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, "a", "2026-01-01", 1)
    foreign = make_run(tmp_path, "b", "2026-01-02", 1)
    (foreign / RECORD).write_text(record)
    assert newest_run(tmp_path, None) == run
    assert f"passing over {foreign / RECORD}: is no record of a run" in capsys.readouterr().out
