"""What stands between a launcher that is killed and processes that nobody ends. Run as a script, on the standard library alone.

    python -I -S guard.py rank PARENT COMMAND...    becomes COMMAND, and is killed by the kernel when PARENT is
    python -I -S guard.py watch MARK                kills what is left of a group when its standard input ends

The first ends the ranks, the second also what they have started (data workers, compilers), which the kernel's signal does not
reach: whatever is in the session of a rank, of which a launcher tells it by lines `+<pid>` and `-<pid>`, and whatever has MARK
in its environment, also in a session of its own. Its standard input is a pipe from the launcher, and ends with it in
whatever way it ends. Signals to a whole control group do not end it before its work is done.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

# How long to wait for processes that SIGKILL does not end: the kernel holds them, for a device or a file system that hangs.
PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def become_rank(parent: int, command: list[str]) -> NoReturn:
    """Replace this process by a command that does not outlive its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before the line above.
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def watch(mark: str) -> None:
    """Read process groups until the launcher is done or gone, then kill what is left."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while left := marked(mark):  # One of them may have started another one meanwhile.
        if time.monotonic() >= end:
            tell_left(left)
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """The processes that were started with `mark` in their environment, and are not dead."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as stream:
                if mark.encode() in stream.read().split(b"\0"):
                    found.append(int(entry.name))
    return found


def tell_left(pids: list[int]) -> None:
    """Say which processes are left to themselves, if there is still somebody to hear it."""
    with suppress(OSError):
        names = ", ".join(map(str, pids))
        print(f"not ended in {PATIENCE_S:g} s, going on without: process {names}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch(sys.argv[2])
    else:
        become_rank(int(sys.argv[2]), sys.argv[3:])
