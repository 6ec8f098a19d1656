"""A fresh group of processes for one command: the ranks of one training run on this machine, and nothing of them afterwards.

torchrun keeps one rendezvous for all attempts and leaves what a rank has started to itself. Here every group is new: a port of
its own, held from before the first rank starts, so that nobody else is given it; each rank a session of its own, so that
its data workers end with it. The first rank that fails ends the others: after a moment in which they may fail by themselves and
say why, they get SIGTERM, then SIGKILL. If the launcher itself is killed, the kernel and a watching process end them
(`guard.py`).

Ranks find what torchrun would have set. A command of one process gets none of it and runs as if typed in the terminal.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lightning_fms.launch import guard

# How many attempts of a run came before; the number of a job in its sweep; where a run writes down its folder.
RESTART, JOB, RUN_FILE = "LIGHTNING_FMS_RESTART", "LIGHTNING_FMS_JOB", "LIGHTNING_FMS_RUN_FILE"
# By which everything that a group has started is known.
_GROUP = "LIGHTNING_FMS_GROUP"
# Left by the launcher of this process or by a former run: a rank that inherits it takes itself for one of that run, or for
# a task of srun's.
_INHERITED = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "PL_GLOBAL_SEED", "LIGHTNING_FMS_RESUME",
    "LIGHTNING_FMS_RUN", "LIGHTNING_FMS_FOLDER", "SLURM_NTASKS", RESTART, JOB, RUN_FILE, _GROUP,
)  # fmt: skip
_SHOWN_LINES = 12
_AFTER_FAILURE_S = 10.0
# The watching process gives up by itself after `guard.PATIENCE_S`, and names what is left.
_WATCH_MORE_S = 10.0
_GUARD = [sys.executable, "-I", "-S", guard.__file__]


@dataclass(frozen=True)
class Outcome:
    """How a group ended.

    Attributes:
        code: 0, or the exit code of the first rank that failed; 128 + n for one that signal n ended.
        rank: that rank.
        signal: what ended it, if it was a signal.
        lines: the last ones that it wrote into its log; none for a rank that wrote to the terminal.
        log: where the rest is.
    """

    code: int
    rank: int | None = None
    signal: int | None = None
    lines: tuple[str, ...] = ()
    log: Path | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return "ended" if self.code == 0 else f"exit code {self.code}"
        if self.signal is not None:
            return f"rank {self.rank} was ended by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} failed with exit code {self.code}"


class ProcessGroup:
    """Starts `command` once a rank; `poll` until it returns how the group has ended.

    To be made in a thread that lives until then, best the main one: the kernel takes its end for that of the launcher.

    Args:
        command: what every rank runs.
        ranks: how many.
        logs: where ranks write; `<logs>.rank-<n>.log`, and `<logs>.log` for the first if `terminal` is off.
        terminal: whether the first rank writes to this process's output instead.
        environment: added to that of this process.
        restart: how many groups of the same run came before.
        settle_s: how long after the first failure the other ranks may still fail by themselves. 3 seconds: an error of a
            peer arrives in less.
        grace_s: seconds from a signal until the ranks that are left are killed. 30: what Slurm gives. After a failure at most 10.
    """

    def __init__(
        self,
        command: Sequence[str],
        ranks: int,
        logs: Path,
        terminal: bool = True,
        environment: Mapping[str, str] | None = None,
        restart: int = 0,
        settle_s: float = 3.0,
        grace_s: float = 30.0,
    ) -> None:
        self.ranks, self.logs, self.terminal = ranks, logs, terminal
        self.settle_s, self.grace_s = settle_s, grace_s
        self.first: Outcome | None = None
        self._ask_at = self._kill_at = float("inf")
        self._passed_on = False
        self._port = _reserve_port()
        logs.parent.mkdir(parents=True, exist_ok=True)
        base = {name: value for name, value in os.environ.items() if name not in _INHERITED}
        mark = f"{os.getpid()}-{self._port.getsockname()[1]}-{time.monotonic_ns()}"
        self._watch = subprocess.Popen(
            [*_GUARD, "watch", f"{_GROUP}={mark}"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=base, start_new_session=True, text=True,
        )  # fmt: skip
        base |= {**(environment or {}), RESTART: str(restart), _GROUP: mark, "PYTHONUNBUFFERED": "1"}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(ranks):
                self._start(rank, command, self._environment(rank, restart) | base)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def log(self, rank: int) -> Path | None:
        """What a rank writes into; `None` for the terminal."""
        if rank == 0:
            return None if self.terminal else self.logs.with_name(f"{self.logs.name}.log")
        return self.logs.with_name(f"{self.logs.name}.rank-{rank}.log")

    def poll(self) -> Outcome | None:
        """Look after the group without waiting; how it has ended, or `None` while it runs."""
        failed = [(rank, code) for rank in list(self._processes) if (code := self._reap(rank)) not in (None, 0)]
        now = time.monotonic()
        if failed and self.first is None:
            # A rank that a signal ended is the cause; its peers fail of that.
            rank, code = min(failed, key=lambda ended: (ended[1] or 0) > 0)
            self.first = self._outcome(rank, code or 0)
            if not self._passed_on:
                self._ask_at = now + self.settle_s
        if now >= self._ask_at:  # There is nothing that they could still do together.
            self._ask(signal.SIGTERM, min(self.grace_s, _AFTER_FAILURE_S))
        if now >= self._kill_at:
            self._signal(signal.SIGKILL)
        if now >= self._kill_at + guard.PATIENCE_S and self._processes:
            self._leave()
        if self._processes:
            return None
        self._close()
        return self.first or Outcome(0)

    def wait(self, every_s: float = 0.05) -> Outcome:
        """Wait for the end of the group."""
        while (outcome := self.poll()) is None:
            time.sleep(every_s)
        return outcome

    def send(self, signum: int) -> None:
        """Pass a signal on to all ranks; those that have not ended `grace_s` later are killed.

        A rank that ends of it with 143 does not cut that time short for the others: the first may still save and requeue.
        """
        self._passed_on = True
        self._ask(signum, self.grace_s)

    def kill(self) -> None:
        """End everything now; what the kernel does not let end is named and left."""
        end = time.monotonic() + guard.PATIENCE_S
        while self._processes:
            self._signal(signal.SIGKILL)
            for rank in list(self._processes):
                if code := self._reap(rank):
                    self.first = self.first or self._outcome(rank, code)
            if self._processes and time.monotonic() >= end:
                self._leave()
            time.sleep(0.01)
        self._close()

    def _ask(self, signum: int, grace_s: float) -> None:
        self._ask_at = float("inf")
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        for process in self._processes.values():
            os.kill(process.pid, signum)  # It has not been waited for, so the number is its own.

    def _leave(self) -> None:
        """Go on without the ranks that are left."""
        rank, process = min(self._processes.items())
        told = f"process {process.pid} has not ended of SIGKILL"
        self.first = self.first or Outcome(128 + signal.SIGKILL, rank, lines=(told,), log=self.log(rank))
        guard.tell_left([process.pid for process in self._processes.values()])
        self._processes.clear()

    def _start(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        path = self.log(rank)
        output = path.open("ab") if path is not None else None
        try:
            process = subprocess.Popen(
                [*_GUARD, "rank", str(os.getpid()), *command],
                env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )  # fmt: skip
        finally:
            if output is not None:
                output.close()
        self._processes[rank] = process
        self._tell(f"+{process.pid}")

    def _environment(self, rank: int, restart: int) -> dict[str, str]:
        if self.ranks == 1:
            return {}
        threads = max(1, (os.cpu_count() or 1) // self.ranks)
        size, port = str(self.ranks), self._port.getsockname()[1]
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{port}", "TORCHELASTIC_RESTART_COUNT": str(restart),
            # The first rank serves the store: nothing of another attempt is in it.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": str(threads),
        }  # fmt: skip

    def _reap(self, rank: int) -> int | None:
        """The exit code of a rank that has ended, and the end of all that it had started."""
        process = self._processes[rank]
        if not _has_ended(process.pid):
            return None
        # Before its number is free for others.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        self._tell(f"-{process.pid}")
        process.wait()
        del self._processes[rank]
        return process.returncode

    def _outcome(self, rank: int, code: int) -> Outcome:
        path = self.log(rank)
        return Outcome(
            128 - code if code < 0 else code, rank, -code if code < 0 else None, last_lines(path) if path else (), path
        )

    def _signal(self, signum: int) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)

    def _tell(self, line: str) -> None:
        assert self._watch.stdin is not None
        with suppress(BrokenPipeError):  # Somebody has ended it; the kernel still ends the ranks.
            self._watch.stdin.write(f"{line}\n")
            self._watch.stdin.flush()

    def _close(self) -> None:
        assert self._watch.stdin is not None
        if not self._watch.stdin.closed:
            with suppress(BrokenPipeError):
                self._watch.stdin.close()
            try:
                self._watch.wait(guard.PATIENCE_S + _WATCH_MORE_S)
            except subprocess.TimeoutExpired:
                guard.tell_left([self._watch.pid])
            self._port.close()


class Signals:
    """Collects the signals that are meant for the processes below, instead of dying of them.

    Ranks are in sessions of their own, so a Ctrl-C in the terminal does not reach them: who started them passes it on.
    SIGHUP, of a terminal that is gone, becomes a SIGTERM.
    """

    _KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: list[int] = []
        self._passed = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for kind in self._KINDS:
            if kind != signal.SIGHUP or signal.getsignal(kind) != signal.SIG_IGN:  # nohup
                self._former[kind] = signal.signal(kind, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def pass_on(self, groups: Sequence[ProcessGroup]) -> None:
        """Send what has arrived since to all groups; a second Ctrl-C or SIGTERM kills them."""
        fresh, self._passed = self.received[self._passed :], len(self.received)
        for number in fresh:
            again = self.received.count(number) > 1 and number != signal.SIGUSR1
            for group in groups:
                group.kill() if again else group.send(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.SIGTERM if number == signal.SIGHUP else number)


def last_lines(path: Path, count: int = _SHOWN_LINES) -> tuple[str, ...]:
    """The last lines of a log that are not empty."""
    with path.open(errors="replace") as stream:
        return tuple(deque((line.rstrip() for line in stream if line.strip()), maxlen=count))


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is left as it is, so that its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reserve_port() -> socket.socket:
    """A socket that holds a free port, which the first rank can still listen on (both allow reuse) and nobody else is given."""
    holder = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if holder.family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind(("", 0))
    return holder
