"""F1/F2 on the file system: a crash before any file operation, or any damage, never yields a checkpoint that is not whole."""

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import load, save, tensors

from lightning_fms.distributed import CheckpointError, checkpoint, commit, latest_committed


class Crash(BaseException):
    """Not an Exception: nothing in between may swallow it."""


class FileOperations:
    """Counts file operations below a folder and crashes before number `fatal`; nothing runs after a crash."""

    events = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

    def __init__(self) -> None:
        self.folder, self.count, self.fatal, self.dead = "", 0, -1, False
        self.active = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active or event not in self.events or not self._concerns(args):
            return
        if event == "open" and args[1] is not None and not set(str(args[1])) & set("wax+") and not self.dead:
            return  # reading harms nothing
        if self.dead or self.count == self.fatal:
            self.dead = True
            raise Crash
        self.count += 1

    def _concerns(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(a, str | Path) and str(a).startswith(self.folder) for a in args[:2])

    def run(self, folder: Path, fatal: int, task: Callable[[], None]) -> bool:
        self.folder, self.count, self.fatal, self.dead, self.active = str(folder), 0, fatal, False, True
        try:
            task()
        except BaseException:
            if not self.dead:
                raise
        finally:
            self.active = False
        return self.dead


@pytest.fixture(scope="module")
def operations() -> FileOperations:
    return FileOperations()


@pytest.mark.parametrize("scenario", ["new", "overwrite", "rotate"])
def test_a_crash_before_any_file_operation_leaves_a_whole_checkpoint_at_least_as_new(operations, tmp_path, scenario):
    fatal = 0
    while True:
        folder = tmp_path / str(fatal)
        save(folder / "step=1", 1)

        def task(folder: Path = folder) -> None:
            save(folder / ("step=1" if scenario == "overwrite" else "step=2"), 2)
            if scenario == "rotate":
                commit.remove(folder / "step=1")

        crashed = operations.run(folder, fatal, task)
        found = latest_committed(folder)
        assert found is not None, f"no checkpoint after a crash at operation {fatal}"
        assert load(found) in (1, 2)
        if scenario == "overwrite":
            assert load(commit.resolve(folder / "step=1")) in (1, 2)
        save(folder / "step=3", 3)  # the next attempt is not hindered by debris
        assert load(latest_committed(folder)) == 3
        if not crashed:
            assert load(found) == 2
            assert operations.count > 5
            break
        fatal += 1


def test_the_newest_is_by_step_and_leftovers_of_dead_attempts_are_cleared(tmp_path):
    save(tmp_path / "b", 2)
    save(tmp_path / "a", 10)
    os.utime(tmp_path / "b")
    assert latest_committed(tmp_path) == tmp_path / "a"
    debris = commit.staging_folder(tmp_path / "a", "0" * 8)
    other = commit.staging_folder(tmp_path / "a.b", "0" * 8)
    debris.mkdir()
    other.mkdir()
    save(tmp_path / "a", 11)
    assert not debris.exists()
    assert other.exists(), "belongs to another checkpoint"
    assert latest_committed(tmp_path / "nowhere") is None


def flip(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip, "has changed"),
    "missing file": (lambda p: next(p.glob("*.distcp")).unlink(), "missing"),
    "missing index": (lambda p: (p / ".metadata").unlink(), "missing"),
    "short file": (lambda p: os.truncate(p / "state.pt", 10), "10 bytes"),
    "foreign file": (lambda p: (p / "__7_0.distcp").write_bytes(b"x"), "does not belong"),
    "empty manifest": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    "torn COMMIT": (lambda p: os.truncate(p / "COMMIT", 5), "damaged"),
    "newer format": (
        lambda p: (p / "COMMIT").write_text(json.dumps({"format": 99, "step": 5, "time_ns": 0})),
        "format version 99",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_next_older_valid_one_is_taken_with_a_word(tmp_path, capsys, damage):
    harm, message = DAMAGE[damage]
    save(tmp_path / "old", 1)
    save(tmp_path / "new", 2)
    harm(tmp_path / "new")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(tmp_path / "new")
    for _ in range(2):
        assert latest_committed(tmp_path) == tmp_path / "old"
    said = capsys.readouterr().out
    assert said.startswith("passing over")
    assert said.count("passing over") == 1
    harm(tmp_path / "old")
    with pytest.raises(CheckpointError, match="none of the 2"):
        latest_committed(tmp_path)  # a restart from zero would hide the loss


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        save(tmp_path / "data", 1)
    assert (tmp_path / "data" / "thesis.txt").exists()


def test_files_and_links_of_that_name_are_replaced(tmp_path):
    (tmp_path / "last.ckpt").write_text("plain")
    save(tmp_path / "last.ckpt", 1)
    assert load(tmp_path / "last.ckpt") == 1
    (tmp_path / "link.ckpt").symlink_to("last.ckpt")
    save(tmp_path / "link.ckpt", 2)
    assert load(tmp_path / "link.ckpt") == 2
    assert load(tmp_path / "last.ckpt") == 1
    checkpoint.write_plain_file(tmp_path / "last.ckpt", {"a": 1})
    assert torch.load(tmp_path / "last.ckpt") == {"a": 1}
    commit.remove(tmp_path / "last.ckpt")
    commit.remove(tmp_path / "link.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_raises_and_leaves_the_target_and_no_debris(tmp_path, monkeypatch):
    save(tmp_path / "x", 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "serialize", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "x", 2)
    assert load(tmp_path / "x") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


class Evil:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.trap}",))


def test_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path, caplog):
    with pytest.raises(ValueError, match=r"state\['path'\] is a PosixPath.*allow_pickle=True") as caught:
        checkpoint.save(tmp_path / "x", tensors(1), {"path": Path("a")}, 1)
    assert not isinstance(caught.value, CheckpointError), "trying again would not help"
    assert list(tmp_path.iterdir()) == []
    content = checkpoint.serialize({"path": Path("a")}, foreign=True)
    assert "state['path'] is a PosixPath" in caplog.text
    checkpoint.save(tmp_path / "x", tensors(1), content, 1)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        checkpoint.load_state(tmp_path / "x")
    assert checkpoint.load_state(tmp_path / "x", weights_only=False) == {"path": Path("a")}


@pytest.mark.parametrize("file", [".metadata", "state.pt"])
def test_no_pickled_code_of_others_runs(tmp_path, file):
    save(tmp_path / "x", 1)
    trap = tmp_path / "executed"
    evil = pickle.dumps(Evil(trap), protocol=2)  # as torch.save
    if file == "state.pt":  # a real archive, whose pickle is exchanged
        with zipfile.ZipFile(tmp_path / "x" / file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "x" / file, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, evil if name.endswith("data.pkl") else part)
    else:
        (tmp_path / "x" / file).write_bytes(evil)
    read = checkpoint.read_metadata if file == ".metadata" else checkpoint.load_state
    with pytest.raises(CheckpointError, match=r"system"):
        read(tmp_path / "x")
    assert not trap.exists()
    pickle.loads(evil)
    assert trap.exists(), "the trap works"


def as_format_before(path: Path) -> None:
    """Rewrite a checkpoint as if manifests had held one text a file, and the state `at` instead of `step`."""
    state = checkpoint.load_state(path)
    commit.write_synced(path / "state.pt", checkpoint.serialize({"at": state["step"]}))
    files = {name: f"{size}:{digest}" for name, (size, digest) in commit.describe(path, os.listdir(path)).items()}
    commit.seal(
        path, {n: text for n, text in files.items() if n not in ("COMMIT", "manifest.json")}, step=state["step"]
    )  # type: ignore[misc]


def test_a_checkpoint_of_the_format_before_loads_by_its_migrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def manifest(old: dict[str, Any]) -> dict[str, Any]:
        split = {name: text.split(":") for name, text in old["files"].items()}
        return {**old, "files": {name: [int(size), digest] for name, (size, digest) in split.items()}}

    save(tmp_path / "x", 3)
    as_format_before(tmp_path / "x")
    monkeypatch.setattr(commit, "FORMAT_VERSION", commit.FORMAT_VERSION + 1)
    save(tmp_path / "new", 4)
    monkeypatch.setattr(commit, "MANIFEST_MIGRATIONS", {commit.FORMAT_VERSION - 1: manifest})
    monkeypatch.setattr(checkpoint, "STATE_MIGRATIONS", {commit.FORMAT_VERSION - 1: lambda old: {"step": old["at"]}})
    assert [load(tmp_path / name) for name in ("x", "new")] == [3, 4]


def test_a_checkpoint_of_a_newer_format_is_one_error_with_the_version_and_the_fix(
    tmp_path: Path, monkeypatch: Any
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(commit, "FORMAT_VERSION", 7)
        save(tmp_path / "x", 3)
    for read in (commit.verify, commit.read_header, checkpoint.load_state):
        with pytest.raises(CheckpointError, match=r"x has format version 7, .* reads up to 1: .*pip install --upgrade"):
            read(tmp_path / "x")


def test_every_released_format_has_a_migration() -> None:
    changed = set(commit.MANIFEST_MIGRATIONS) | set(checkpoint.STATE_MIGRATIONS)
    assert changed == set(range(commit.FIRST_RELEASED, commit.FORMAT_VERSION))
