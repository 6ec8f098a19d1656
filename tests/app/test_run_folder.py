"""Run folders: numbered, never mixed, found again, and gone if nothing was trained in them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_fms.run_folder import RECORD, attempts, discard, find, locate, newest_checkpoint, numbered, reserve


def make_run(root: Path, name: str, started: str, *steps: int) -> Path:
    run = reserve(root, name)
    record = {"attempts": [{"started": started, "overrides": [f"name={name}"]}]}
    OmegaConf.save(OmegaConf.create(record), run / RECORD)
    for step in steps:
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / "checkpoints" / f"step={step}.ckpt").write_bytes(b"plain")
    return run


def test_every_reservation_is_a_folder_of_its_own_also_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: reserve(tmp_path, "run"), range(16)))
    assert sorted(path.name for path in made) == [f"{number:03}" for number in range(1, 17)]
    assert reserve(tmp_path, "run").name == "017"


def test_numbers_are_ordered_as_numbers_and_nothing_else_counts(tmp_path: Path) -> None:
    for name in ("002", "1000", "sweeps", "10"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert [path.name for path in numbered(tmp_path / "run")] == ["002", "10", "1000"]
    assert reserve(tmp_path, "run").name == "1001"


def test_a_folder_without_training_is_removed_with_its_empty_parents(tmp_path: Path) -> None:
    kept = make_run(tmp_path / "runs", "a", "2026-01-01", 1)
    empty, other = reserve(tmp_path / "runs", "a"), reserve(tmp_path / "runs", "b")
    (empty / "tensorboard").mkdir()
    for folder in (kept, empty, other):
        discard(folder)
    assert kept.is_dir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert not empty.exists()


def test_the_newest_run_with_a_checkpoint_is_found_by_name_or_among_all(tmp_path: Path) -> None:
    assert find(tmp_path, None) is None
    first = make_run(tmp_path, "a", "2026-01-03T00:00:00", 5, 20)
    make_run(tmp_path, "a", "2026-01-04T00:00:00")
    reserve(tmp_path, "a")
    other = make_run(tmp_path, "b", "2026-01-01T00:00:00", 1)
    assert find(tmp_path, "a") == (first, first / "checkpoints" / "step=20.ckpt")
    assert find(tmp_path, "b") == (other, other / "checkpoints" / "step=1.ckpt")
    assert find(tmp_path, None) == find(tmp_path, "a")
    assert find(tmp_path, "c") is None
    assert attempts(first)[-1]["overrides"] == ["name=a"]


def test_a_folder_that_was_never_committed_is_no_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", "2026-01-01")
    (run / "checkpoints" / "step=9.ckpt").mkdir(parents=True)
    assert newest_checkpoint(run) is None
    with pytest.raises(ValueError, match="no valid checkpoint"):
        locate(run)
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        locate(run / "checkpoints" / "step=9.ckpt")
    with pytest.raises(ValueError, match="does not exist"):
        locate(tmp_path / "nothing")
