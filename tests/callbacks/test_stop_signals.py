"""A signal is for the process that it is sent to, and ends it even where nothing can be written any more."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fms.callbacks import HangWatchdog
from lightning_fms.callbacks.stop_signals import StopSignals, rank_name

CODES = {signal.SIGTERM: 143}
FORK = multiprocessing.get_context("fork")


def in_process(function: Callable[..., object], *args: object) -> int:
    """Exit code of a function in a process of its own."""
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def parent_of_a_terminated_child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals = StopSignals(CODES, deadline_s=60.0)
    signals.install()
    child = FORK.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(30)
    died, received = child.exitcode, signals.received
    child.kill()
    signals.remove()
    os._exit(10 * (died == -signal.SIGTERM) + (received is None))


def test_a_forked_child_dies_of_a_signal_that_its_parent_never_hears_of() -> None:
    assert in_process(parent_of_a_terminated_child) == 11


def broken_stderr() -> None:
    """Neither `sys.stderr` nor the descriptor below it can be written."""
    threading.excepthook = lambda _: None
    os.close(2)


def stopped_too_late() -> None:
    broken_stderr()
    signals = StopSignals(CODES, deadline_s=0.1, before_leaving=lambda: 1 / 0)
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(1)


def hung(folder: Path) -> None:
    broken_stderr()
    HangWatchdog(1.0, 1.0, folder)._end("step", 1.0)


def test_a_process_is_ended_even_if_nothing_can_be_said(tmp_path) -> None:
    assert in_process(stopped_too_late) == 143
    (tmp_path / "file").touch()
    assert in_process(hung, tmp_path / "file" / "hang") == 124  # there can be no such folder


def test_a_process_is_named_as_its_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    named = [rank_name()]
    for name, value in (("LOCAL_RANK", "1"), ("SLURM_PROCID", "5"), ("RANK", "9")):
        monkeypatch.setenv(name, value)
        named.append(rank_name())
    assert named == ["0", "1", "5", "9"]
