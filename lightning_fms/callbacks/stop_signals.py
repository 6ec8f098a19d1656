"""Signals that ask a process to stop: noticed at once, acted upon later, and never ignored for long.

Python runs a signal handler between two instructions of the main thread: in the middle of an optimizer step, or, where that
thread waits in a collective, not at all. So the handler does nothing but set a flag. `signal.set_wakeup_fd` makes the
interpreter also write the signal's number into a pipe, at the moment it comes and whatever the main thread does; a thread that
reads this pipe starts the clock. When the time is up and the process has not left by itself, it is made to leave, with the
stack of every thread on record. A forked child shares the pipe and the handlers, so a signal to it alone would be taken for
one to its parent; it gives both up at once, and dies of the signal as it did before.
"""

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakSet

_STDERR = 2


def rank_name() -> str:
    """The rank of this process, as its launcher names it; `"0"` where there is none."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def say(text: str) -> None:
    """Write a line to stderr, whatever `sys.stderr` is; where nobody can read it, do nothing."""
    with suppress(OSError):
        os.write(_STDERR, f"{text}\n".encode(errors="replace"))


def say_stacks() -> None:
    """Write the stack of every thread to stderr."""
    faulthandler.dump_traceback(_STDERR, all_threads=True)


def leave(code: int, last: Callable[[], object]) -> NoReturn:
    """Do the last thing, and end the process from any thread, even if that fails."""
    try:
        last()
    finally:
        os._exit(code)


class StopSignals:
    """Handlers of some signals, from `install` to `remove`. To be made in the main thread.

    Args:
        exit_codes: The exit code by signal.
        deadline_s: Seconds from the first signal until the process is made to leave.
        before_leaving: Called before the process leaves in a hurry; must not wait.

    Attributes:
        received: The first of these signals that came, `None` before.
        hasty: While it is set, a signal ends the process at once: nothing is being written that could be lost.
    """

    def __init__(
        self, exit_codes: Mapping[int, int], deadline_s: float, before_leaving: Callable[[], None] = lambda: None
    ) -> None:
        self.exit_codes, self.deadline_s, self._before_leaving = dict(exit_codes), deadline_s, before_leaving
        self.received: int | None = None
        self.hasty = False
        self._former: dict[int, Any] = {}
        self._former_fd = -1
        self._pipe: tuple[int, int] | None = None

        _MADE.add(self)

    def install(self) -> None:
        """Take over the signals.

        Raises:
            ValueError: Outside the main thread, where Python sets no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signals can be handled in the main thread only; call Trainer.fit there")
        if self._pipe is not None:
            return
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._former_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._handle) for number in self.exit_codes}
        threading.Thread(target=self._watch, args=(self._pipe[0],), name="stop-signals", daemon=True).start()

    def remove(self) -> None:
        """Give the signals back; the thread ends."""
        if self._pipe is None:
            return
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._former_fd)
        (_, write), self._pipe = self._pipe, None
        os.close(write)  # the thread reads the end of the pipe, and closes its side

    def give_up_in_child(self) -> None:
        """Leave the parent's signals alone, and have the former handlers again."""
        if self._pipe is None:
            return
        signal.set_wakeup_fd(-1)
        for number, handler in self._former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for end in self._pipe:
            os.close(end)
        self._pipe, self.received, self.hasty = None, None, False

    def act_hastily(self, hasty: bool) -> None:
        """Say whether a signal may end the process at once; one that has come already does."""
        self.hasty = hasty
        if hasty and self.received is not None:
            self._leave(self.received, "")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number

    def _watch(self, pipe: int) -> None:
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([pipe], [], [], left)
            if not readable:
                assert self.received is not None
                self._leave(self.received, f"did not stop within {self.deadline_s:g} s after")
            numbers = os.read(pipe, 64) if readable else b""
            if not numbers:
                os.close(pipe)
                return
            for number in set(numbers) & set(self.exit_codes):
                self._handle(number, None)
                if deadline is None:
                    deadline = time.monotonic() + self.deadline_s
                if self.hasty:
                    self._leave(number, "stopped at once by")
            if self._former_fd >= 0:
                with suppress(OSError):
                    os.write(self._former_fd, numbers)

    def _leave(self, number: int, what: str) -> NoReturn:
        """End the process from any thread."""

        def last() -> None:
            if what:
                say(f"rank {rank_name()}: {what} {signal.Signals(number).name}")
            if "within" in what:
                say_stacks()
            self._before_leaving()

        leave(self.exit_codes[number], last)


_MADE: WeakSet[StopSignals] = WeakSet()
# The signals that the forking thread had blocked before.
_FORKING = threading.local()


def _before_fork() -> None:
    """A signal to the child waits until it is the child's: before that it would be noted, and forgotten."""
    ours = {number for signals in list(_MADE) for number in signals.exit_codes}
    _FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)


def _after_fork_in_child() -> None:
    for signals in list(_MADE):
        signals.give_up_in_child()
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
