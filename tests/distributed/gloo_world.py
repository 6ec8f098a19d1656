"""Worlds of gloo processes for tests: imports happen once in a fork server, so a world of three costs a second.

Not forked from the test process: a test before may have started autograd's threads in it, and then no fork can run backward.
"""

import fcntl
import multiprocessing as mp
import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_fms.distributed.strategy"])
TIMEOUT_S = 200


def run_world(size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`function(*args)` on each of `size` ranks, as torchrun would start them; returns the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        _CONTEXT.Process(target=_rank, args=(rank, size, port, function, args, folder / f"{function.__name__}.{rank}"))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    results = []
    for rank in range(size):
        file = folder / f"{function.__name__}.{rank}"
        assert file.exists(), f"rank {rank} of {size} {'did not finish' if late else 'died'}"
        error, result = pickle.loads(file.read_bytes())
        assert error is None, f"rank {rank} of {size}:\n{error}"
        results.append(result)
    return results


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


def _rank(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], file: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
        OMP_NUM_THREADS="1",
    )
    os.environ.pop("PL_GLOBAL_SEED", None)
    warnings.simplefilter("ignore")
    try:
        outcome = pickle.dumps((None, function(*args)))
    except BaseException:
        outcome = pickle.dumps((traceback.format_exc(), None))
    staging = file.with_name(f"{file.name}.tmp")
    staging.write_bytes(outcome)
    staging.rename(file)
    os._exit(0)
