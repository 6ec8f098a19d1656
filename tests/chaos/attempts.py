"""One attempt of a run: some ranks as real processes, which can be hit by signals, and how each of them ended.

The ranks are forked from the test process, which has imported everything, so an attempt costs tenths of a second and not
seconds a rank. What a rank prints goes to a file of its own.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.worlds import free_port

PATIENCE_S = 60.0  # on a loaded machine; ranks that are still there are stuck


class Stuck(AssertionError):
    """Ranks that did not end."""


class Attempt:
    """`function(*args)` in `world` processes that find their rank in the environment.

    Args:
        folder: Where the ranks' output goes, into `rank-<r>.log`.
        world: Number of ranks.
        function: What each of them calls; may raise SystemExit.
        args: Its arguments.
    """

    def __init__(self, folder: Path, world: int, function: Callable[..., Any], *args: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context, port = multiprocessing.get_context("fork"), free_port()
        self.folder, self.world = folder, world
        self.processes = [
            context.Process(target=_rank, args=(rank, world, port, folder, function, args)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def send(self, number: int, ranks: Sequence[int], skew_s: float = 0.0) -> None:
        """Send a signal to some ranks, so long one after the other."""
        for position, rank in enumerate(ranks):
            time.sleep(skew_s if position else 0.0)
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def wait_for(self, happened: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Wait until something is the case; False if all ranks have ended first.

        Raises:
            Stuck: If neither happens.
        """
        deadline = time.monotonic() + patience_s
        while not happened():
            if not any(process.is_alive() for process in self.processes):
                return happened()
            if time.monotonic() > deadline:
                self.kill()
                raise Stuck(f"what was waited for did not happen; see {self.folder}\n{self.output()}")
            time.sleep(0.002)
        return True

    def codes(self, patience_s: float = PATIENCE_S) -> list[int]:
        """Exit code of each rank, negative where a signal ended it.

        Raises:
            Stuck: If a rank does not end; it is killed.
        """
        deadline = time.monotonic() + patience_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        if stuck:
            self.send(signal.SIGUSR2, stuck)  # they write down where they are
            time.sleep(1)
        self.kill()
        if stuck:
            raise Stuck(f"ranks {stuck} of {self.world} did not end; see {self.folder}\n{self.output()}")
        return [int(process.exitcode or 0) for process in self.processes]

    def kill(self) -> None:
        """End what is left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def output(self) -> str:
        """The last lines of each rank."""
        parts = []
        for rank in range(self.world):
            log = self.folder / f"rank-{rank}.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            parts.append("\n".join([f"-- rank {rank}", *lines[-12:]]))
        return "\n".join(parts)


def _rank(rank: int, world: int, port: int, folder: Path, function: Callable[..., Any], args: tuple) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", buffering=1),
        os.fdopen(2, "w", buffering=1),
    )  # pytest has put others there
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=f"test-{port}",
    )  # fmt: skip
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)  # no pytest or torch clean-up of the parent's in a child
