"""Processes that note what happens to them, and whether they are still there."""

import os
import time
from pathlib import Path

# Starts processes of its own, as a data worker and as a compiler in a session of its own, notes all numbers, and goes on as
# the test says.
RANK = """
import os, signal, subprocess, sys, time
rank = os.environ.get("RANK", "0")
wait = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
worker, compiler = subprocess.Popen(wait), subprocess.Popen(wait, start_new_session=True)
open(f"pids.{rank}.aside", "w").write(f"{os.getpid()} {worker.pid} {compiler.pid}")
os.replace(f"pids.{rank}.aside", f"pids.{rank}")
"""
PATIENCE_S = 60.0


def wait_for(path: Path) -> str:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.02)
    return path.read_text()


def pids(folder: Path, ranks: int) -> list[int]:
    return [int(pid) for rank in range(ranks) for pid in wait_for(folder / f"pids.{rank}").split()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def assert_gone(numbers: list[int]) -> None:
    end = time.monotonic() + PATIENCE_S
    assert numbers
    while left := [pid for pid in numbers if is_running(pid)]:
        assert time.monotonic() < end, f"still running: {left}"
        time.sleep(0.02)


def clean(environment: dict[str, str] | None = None) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "LIGHTNING_FMS_"))} | (
        environment or {}
    )
