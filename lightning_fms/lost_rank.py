"""One line where a rank is gone, instead of what the others raise about it.

A process that is killed, mostly for want of memory, says nothing. The ranks beside it find a closed connection and raise an
error of a hundred lines that names no cause, or, on GPUs, wait inside a collective until Lightning's observer kills them too.
So a thread of the first process looks after the processes that Lightning started, and says at once which one died of which
signal. A launcher from outside (torchrun, Slurm, `fms-supervise`) does that by itself.
"""

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Lightning's observer looks every 5 s, and then kills this process, too.
POLL_SECONDS = 0.1
_CLOSED = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|pair closure)|remote process exited", re.IGNORECASE | re.DOTALL
)
# The kernel's, or an administrator's, when memory is short.
_MEANS = {signal.SIGKILL: " (out of host memory?)"}


def is_lost_connection(error: BaseException) -> bool:
    """Whether this is what a rank raises about another one that has ended."""
    return isinstance(error, RuntimeError) and _CLOSED.search(str(error)) is not None


def killed(processes: Sequence[subprocess.Popen[Any]]) -> str | None:
    """'rank 1 was killed by SIGKILL', or `None` while no process has died of a signal.

    Args:
        processes: of ranks 1, 2, ... on this host.
    """
    for rank, process in enumerate(processes, start=1):
        code = process.poll()
        if code is not None and code < 0 and -code not in (signal.SIGINT, signal.SIGTERM):
            number = signal.Signals(-code)
            return f"rank {rank} was killed by {number.name}{_MEANS.get(number, '')}"
    return None


class Watch:
    """What was seen."""

    def __init__(self, processes: Callable[[], Sequence[subprocess.Popen[Any]]], say: Callable[[str], None]) -> None:
        self._processes, self._say = processes, say
        self._done, self._lock = threading.Event(), threading.Lock()
        self._said = False

    def look(self) -> bool:
        """Whether a rank was killed; says so the first time."""
        with self._lock:
            if not self._said and (text := killed(self._processes())):
                self._say(text)
                self._said = True
            return self._said

    def settles(self, seconds: float = 2.0) -> bool:
        """The same, for a moment at which a process that was killed may not have ended yet."""
        return self.look() or (self._done.wait(seconds) or self.look())

    def run(self) -> None:
        """Look until told to stop, or a rank is lost."""
        while not self._done.wait(POLL_SECONDS) and not self.look():
            pass

    def stop(self) -> None:
        """Look no more."""
        self._done.set()


@contextmanager
def watching(processes: Callable[[], Sequence[subprocess.Popen[Any]]], say: Callable[[str], None]) -> Iterator[Watch]:
    """Look after processes in a thread while the block runs.

    Args:
        processes: returns them; there are none before a fit starts.
        say: called once, in the thread, with what happened to which rank.
    """
    watch = Watch(processes, say)
    threading.Thread(target=watch.run, daemon=True, name="lost-rank").start()
    try:
        yield watch
    finally:
        watch.stop()
