"""What stands between a launcher that is killed and processes that nobody ends. Run as a script, on the standard library alone.

    python -I -S guard.py rank PARENT COMMAND...    becomes COMMAND, and is killed by the kernel when PARENT is
    python -I -S guard.py watch                     kills the process groups it was told of when its standard input ends

The first ends the ranks, the second also what they have started (data workers, compilers), which the kernel's signal does not
reach. A launcher tells the second by lines `+<group>` and `-<group>`; its pipe ends with it, in whatever way it ends.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


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


def watch() -> None:
    """Read process groups until the launcher is gone, then kill those that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch()
    else:
        become_rank(int(sys.argv[2]), sys.argv[3:])
