"""The watching process: nothing ends it before its work is done, and what it cannot end does not hold it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launched import PATIENCE_S, assert_gone

from lightning_fms.launch import guard

MARK = "LIGHTNING_FMS_GROUP"
WAITS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ignores(pid: int) -> set[int]:
    mask = int(Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0], 16)
    return {number for number in IGNORED if mask >> (number - 1) & 1}


def test_signals_to_everything_do_not_end_the_watching_process_first() -> None:
    mark = f"signals-{os.getpid()}"
    left = subprocess.Popen(WAITS, env={MARK: mark}, start_new_session=True)
    watching = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, "watch", f"{MARK}={mark}"], stdin=-1)
    try:
        end = time.monotonic() + PATIENCE_S
        while ignores(watching.pid) != set(IGNORED):
            assert time.monotonic() < end
            time.sleep(0.02)
        for number in IGNORED:
            watching.send_signal(number)
        watching.communicate()
        assert watching.returncode == 0
        assert left.wait() == -signal.SIGKILL
    finally:
        for process in (watching, left):
            process.kill()


REFUSED = """
import sys
from lightning_fms.launch import guard
def refuse(pid, number):
    raise PermissionError
guard.os.kill, guard.PATIENCE_S = refuse, 0.1
guard.watch(sys.argv[1])
"""


def test_what_the_watching_process_cannot_end_is_named_and_left() -> None:
    mark = f"refused-{os.getpid()}"
    left = subprocess.Popen(WAITS, env={MARK: mark}, start_new_session=True)
    try:
        command = [sys.executable, "-c", REFUSED, f"{MARK}={mark}"]
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
    finally:
        left.kill()
        left.wait()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"not ended in 0.1 s, going on without: process {left.pid}\n"
    assert_gone([left.pid])
