"""The cache is bounded, shared, whole after a crash, and deletes only what it wrote."""

import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import pytest

from lightning_fms.data.sources.cache import Cache, cache_key

SPAWN = multiprocessing.get_context("fork")


def key(name: object) -> str:
    return cache_key("block", name)


def writer(data: bytes, log: Path | None = None, seconds: float = 0.0):
    def write(folder: Path) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        (folder / "block.bin").write_bytes(data)

    return write


def never(folder: Path) -> None:
    raise AssertionError("made although it was there")


def read(cache: Cache, name: object, write) -> bytes:
    with os.fdopen(cache.open(key(name), "block.bin", write), "rb") as file:
        return file.read()


def held(cache: Cache) -> int:
    return sum(file.stat().st_size for file in cache.folder.rglob("block.bin"))


def test_an_entry_is_made_once_and_found_by_others(tmp_path: Path) -> None:
    assert read(Cache(tmp_path), 1, writer(b"one")) == b"one"
    assert read(pickle.loads(pickle.dumps(Cache(tmp_path))), 1, never) == b"one"
    assert read(Cache(tmp_path), 2, writer(b"two")) == b"two"


def test_opening_makes_nothing(tmp_path: Path) -> None:
    Cache(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_environment_sets_folder_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FMS_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("LIGHTNING_FMS_CACHE_LIMIT", "1.5 GB")
    assert (Cache().folder, Cache().limit) == (tmp_path / "here", 1_500_000_000)
    assert (Cache(tmp_path, 7).folder, Cache(tmp_path, 7).limit) == (tmp_path, 7)
    monkeypatch.delenv("LIGHTNING_FMS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache().folder == tmp_path / "lightning_fms"
    with pytest.raises(ValueError, match="cache limit 'much' is no size; give bytes"):
        Cache(tmp_path, "much")


def test_the_least_recently_opened_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=300)
    for name in "abc":
        read(cache, name, writer(bytes(100)))
        time.sleep(0.02)
    read(cache, "a", never)
    time.sleep(0.02)
    read(cache, "d", writer(bytes(100)))
    assert held(cache) == 300
    for name in "acd":
        read(cache, name, never)
    assert read(cache, "b", writer(b"again")) == b"again"


def test_an_evicted_file_that_is_open_stays_readable(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=100)
    descriptor = cache.open(key(1), "block.bin", writer(b"x" * 100))
    read(cache, 2, writer(bytes(100)))
    assert not cache._entry(key(1)).exists()
    assert os.pread(descriptor, 200, 0) == b"x" * 100
    os.close(descriptor)


def test_an_entry_larger_than_the_limit_works_and_goes_with_the_next(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10)
    assert read(cache, 1, writer(bytes(100))) == bytes(100)
    read(cache, 1, never)
    read(cache, 2, writer(bytes(50)))
    assert held(cache) == 50


def test_nothing_but_entries_is_deleted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10)
    read(cache, 1, writer(bytes(100)))
    mine = [tmp_path / "notes.txt", cache._entry(key(1)) / "notes.txt", cache._tree / "aa" / "mine" / "block.bin"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    read(cache, 2, writer(bytes(50)))
    read(cache, 3, writer(bytes(50)))
    assert all(path.exists() for path in mine)
    assert not cache._entry(key(2)).exists()


def test_one_process_makes_it_while_others_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def child() -> None:
        assert read(Cache(tmp_path / "cache"), 1, writer(b"slow", log, 0.3)) == b"slow"

    children = [SPAWN.Process(target=child) for _ in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join(30)
    assert [process.exitcode for process in children] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 1


def test_a_killed_writer_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=10)

    def die(folder: Path) -> None:
        (folder / "block.bin").write_bytes(b"ha")
        os.kill(os.getpid(), signal.SIGKILL)

    for name in (1, 2):
        process = SPAWN.Process(target=lambda name=name: cache.open(key(name), "block.bin", die))
        process.start()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
    assert len(list(cache._aside.iterdir())) == 2
    assert read(cache, 1, writer(b"whole")) == b"whole"
    assert list(cache._aside.iterdir()) == []  # the next look at the cache cleared the other one too


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "block.bin").write_bytes(b"half")
        raise RuntimeError("no")

    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        cache.open(key(1), "block.bin", fail)
    assert not list(tmp_path.rglob("*.bin"))
    assert read(cache, 1, writer(b"whole")) == b"whole"


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        ValueError, match=r"the cache cannot be used \(No space left on device\); make room, or set LIGHT"
    ):
        Cache(tmp_path).open(key(1), "block.bin", full)


def test_processes_that_evict_each_other_get_on(tmp_path: Path) -> None:
    def child(seed: int) -> None:
        cache = Cache(tmp_path, limit=250)
        for step in range(60):
            name = (step * 7 + seed * 3) % 9
            assert read(cache, name, writer(bytes([name]) * 100)) == bytes([name]) * 100

    children = [SPAWN.Process(target=child, args=(seed,)) for seed in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
    assert [process.exitcode for process in children] == [0, 0, 0]
    read(Cache(tmp_path, limit=250), "last", writer(bytes(100)))
    assert held(Cache(tmp_path)) <= 250
