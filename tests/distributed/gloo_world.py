"""Worlds of gloo processes for the tests of this folder, and what they share between pytest's workers."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import worlds

TIMEOUT_S = 200


def run_world(size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`function(*args)` on each of `size` ranks, which may write to `folder`; returns the results by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    return worlds.run_world(function, size, *args, timeout=TIMEOUT_S, quiet=True)


def once(factory: pytest.TempPathFactory, name: str, compute: Callable[[Path], Any]) -> Any:
    """`compute(folder)`, done by the first pytest worker that asks and shared with the others."""
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder = shared / f"once-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / "result"
        if not result.exists():
            staging = folder / "staging"
            staging.write_bytes(pickle.dumps(compute(folder)))
            staging.rename(result)
        return pickle.loads(result.read_bytes())
