"""The next micro-batch is made while one is trained: in order, with its error in its place, and ended with the iteration."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import write_jsonl

from lightning_fms.data import StreamLoader
from lightning_fms.data.ahead import Ahead, Pace
from lightning_fms.data.feed import Feed
from lightning_fms.data.loader import MicroBatch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fms-data"]


def wait_for(what: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    write_jsonl(tmp_path / "a", "p", 200)
    return {"sources": {"a": tmp_path / "a"}, "seq_len": 24, "global_batch_size": 6, "micro_batch_size": 2}


def test_a_call_is_made_elsewhere_and_its_result_or_error_taken_here() -> None:
    ahead = Ahead()
    ahead.begin(threading.current_thread)
    assert ahead.busy
    assert ahead.take() is not threading.current_thread()
    ahead.begin(lambda: 1 // 0)
    assert isinstance(ahead.take(), ZeroDivisionError)
    assert not ahead.busy


def test_an_exit_in_a_call_is_told_of() -> None:
    def leave() -> None:
        raise SystemExit(3)

    ahead = Ahead()
    ahead.begin(leave)
    assert isinstance(ahead.take(20), SystemExit)


class Event:
    """In the place of a CUDA event: what was recorded and waited for, in order."""

    log: list[str] = []

    def __init__(self, blocking: bool) -> None:
        self.number = 0

    def synchronize(self) -> None:
        if self.number:
            Event.log.append(f"wait {self.number}")

    def record(self) -> None:
        self.number = 1 + sum(entry.startswith("begin") for entry in Event.log)
        Event.log.append(f"begin {self.number}")


def test_a_host_is_held_to_so_many_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "log", [])
    pace = Pace(2)
    for _ in range(4):
        pace.begin()
    assert Event.log == ["begin 1", "begin 2", "wait 1", "begin 3", "wait 2", "begin 4"]


def test_a_call_that_takes_too_long_can_be_taken_later() -> None:
    ahead, go_on = Ahead(), threading.Event()
    ahead.begin(lambda: go_on.wait(20))
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        ahead.take(0.01)
    go_on.set()
    assert ahead.take() is True


def test_the_thread_ends_with_its_owner() -> None:
    before = set(threads())
    ahead = Ahead()
    (own,) = set(threads()) - before
    del ahead
    own.join(20)
    assert not own.is_alive()


@pytest.mark.parametrize("rewind", [False, True])
def test_batches_are_those_without_workers(data: dict[str, Any], rewind: bool) -> None:
    batches = []
    for workers in (0, 2):
        before = set(threads())
        feed = Feed(StreamLoader(**data, num_workers=workers), 12, rewind)
        taken = list(itertools.islice(feed, 12))
        batches.append(taken)
        assert bool(set(threads()) - before) == (workers > 0)
        assert all(micro.batch is batch for micro, batch in zip(feed.delivered, taken, strict=True))
        feed.close()
    for ours, theirs in zip(*batches, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_looking_ahead_skips_nothing(data: dict[str, Any]) -> None:
    plain, looking = (Feed(StreamLoader(**data, num_workers=1), 9) for _ in range(2))
    seen = []
    for batch, _ in zip(looking, range(9), strict=False):
        seen.append((batch, looking.look_ahead(), looking.look_ahead()))
    for (batch, ahead, again), expected in zip(seen, plain, strict=False):
        assert ahead is again
        assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert all(a[1] is not None and a[1].batch is b[0] for a, b in itertools.pairwise(seen))
    plain.close()
    looking.close()


def test_an_error_comes_in_its_place(data: dict[str, Any]) -> None:
    feed, calls = Feed(StreamLoader(**data, num_workers=1), 9), []
    load = feed._load

    def third_fails() -> MicroBatch:
        calls.append(threading.current_thread())
        if len(calls) == 3:
            raise ValueError("the third")
        return load()

    feed._load = third_fails  # type: ignore[method-assign]
    batches = iter(feed)
    next(batches)
    next(batches)
    wait_for(lambda: len(calls) == 3)
    with pytest.raises(ValueError, match="the third"):
        next(batches)
    assert calls[0] is threading.current_thread()  # which forks the workers
    assert calls[1] is not calls[0]
    feed.close()


def test_closing_waits_for_the_batch_on_its_way(data: dict[str, Any]) -> None:
    feed, go_on = Feed(StreamLoader(**data, num_workers=1), 9), threading.Event()
    batches, load = iter(feed), feed._load
    next(batches)
    feed._thread.take()  # type: ignore[union-attr]
    feed._load = lambda: (go_on.wait(20), load())[1]  # type: ignore[method-assign]
    feed._begin_next()
    threading.Timer(0.2, go_on.set).start()
    feed.close()
    assert go_on.is_set()
    feed._load = load  # type: ignore[method-assign]
    assert next(iter(feed))["input_ids"].shape == (2, 24)  # a new iteration begins
    feed.close()


def test_a_feed_that_could_not_be_closed_is_closed_later(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fms.data.feed._LEAVE_S", 0.05)
    feed, go_on = Feed(StreamLoader(**data, num_workers=1), 9, rewind=True), threading.Event()
    batches, load = iter(feed), feed._load
    next(batches)
    feed._thread.take()  # type: ignore[union-attr]
    feed._load = lambda: (go_on.wait(20), load())[1]  # type: ignore[method-assign]
    feed._begin_next()
    with pytest.raises(RuntimeError, match=r"not there after 0\.05 s"):
        next(iter(feed))
    go_on.set()
    monkeypatch.setattr("lightning_fms.data.feed._LEAVE_S", 20)
    feed._load = load  # type: ignore[method-assign]
    assert next(iter(feed))["input_ids"].shape == (2, 24)
    feed.close()
