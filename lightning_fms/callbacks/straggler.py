"""Which rank the others wait for, how long, and why.

A sharded step takes as long as its slowest rank, and looks equally slow on all of them. What tells them apart is when each
one began its collectives (see `collectives`), and how long it waited for data. Both are looked at now and then, and exchanged
beside the steps: sent off at one step and read at the next, on the CPU. Nothing waits for the device. On GPUs the host runs ahead
of the device, so a slow host or slow data shows at once, a slow GPU where the host waits for its device.
"""

import socket
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fms.callbacks.agreement import agreement_of
from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.collectives import Begun, begun, lateness
from lightning_fms.callbacks.data_clock import DataWait, data_wait_of, end_data_clock

_COLLECTIVES = 256  # of each rank that are compared
_NUMBERS = 3  # seconds, data wait, key


@dataclass(frozen=True)
class Report:
    """Of some steps, by rank, in seconds a step: the step itself, waiting for data, and making others wait."""

    step_seconds: list[float]
    data_wait: list[float]
    late: list[float]

    def slowest(self) -> tuple[int, float, str]:
        """The rank that makes others wait most, how long, and why."""
        rank = max(range(len(self.late)), key=lambda r: self.late[r])
        waits_for_data = self.data_wait[rank] - min(self.data_wait) >= self.late[rank] / 2
        return rank, self.late[rank], "its data comes late" if waits_for_data else "its own work takes longer"


class Straggler(L.Callback):
    """Name slow ranks, and log `data_wait_seconds` and `straggler_seconds` of a step, the largest of all ranks.

    Args:
        every_n_steps: optimizer steps between two looks. 100: reading the recorder takes tens of milliseconds.
        share: part of a step that others wait for a rank from which it is called slow.
        patience: looks in a row at which it must have been so, before a word is said; a hiccup is not worth one.

    Attributes:
        report: what the last look saw; `None` before.
        slow: ranks that were slow at the last `patience` looks.

    Raises:
        ValueError: for numbers below 1, a share that is not between 0 and 1.
    """

    def __init__(self, every_n_steps: int = 100, share: float = 0.2, patience: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("patience", patience)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if not 0 < share < 1:
            raise ValueError(f"{share=}: must be between 0 and 1")
        self.every_n_steps, self.share, self.patience = every_n_steps, share, patience
        self.report: Report | None = None
        self.slow: list[int] = []
        self._clock = StepClock()
        self._hosts: list[str] = []
        self._seen: list[int] = []
        self._data_wait: DataWait | None = None
        self._since, self._since_wall, self._steps = 0.0, 0.0, 0
        self._sent: tuple[list[Tensor], dist.Work | None] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Learn the hosts' names."""
        self._clock.start(trainer)
        group = agreement_of(trainer).group
        hosts: list[Any] = [socket.gethostname()] * trainer.world_size
        if group is not None:
            dist.all_gather_object(hosts, socket.gethostname(), group=group)
        self._hosts, self._seen, self._sent, self._data_wait = hosts, [], None, data_wait_of(trainer)
        self._restart()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read what was sent a step ago, and send at a due step."""
        if self._clock.ended_step(trainer):
            self._steps += 1
            if self._sent is not None:
                self._read(trainer, pl_module)
            if trainer.global_step % self.every_n_steps == 0:
                self._send(trainer)
                self._restart()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Read what the last step sent, if it did."""
        if self._sent is not None:
            self._read(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave nothing that listens."""
        end_data_clock(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave nothing that listens."""
        end_data_clock(trainer)

    def _restart(self) -> None:
        self._since, self._since_wall = time.monotonic(), time.time()
        self._steps = 0

    def _send(self, trainer: L.Trainer) -> None:
        group = agreement_of(trainer).group
        recorded = begun(self._since_wall, without=group) if group is not None else None
        assert self._data_wait is not None
        seconds, waited = (time.monotonic() - self._since) / self._steps, self._data_wait.take() / self._steps
        # [seconds, data wait, key | steps, (number, seconds) x N]; what is not filled is -1
        mine = torch.full((_NUMBERS + 1 + 2 * _COLLECTIVES,), -1.0, dtype=torch.float64)
        mine[:_NUMBERS] = torch.tensor([seconds, waited, recorded.key if recorded else -1])
        mine[_NUMBERS] = self._steps
        if recorded is not None:
            pairs = list(zip(recorded.numbers, recorded.seconds, strict=True))[-_COLLECTIVES:]
            flat = torch.tensor(pairs, dtype=torch.float64).flatten()
            mine[_NUMBERS + 1 : _NUMBERS + 1 + len(flat)] = flat
        everyone = [torch.empty_like(mine) for _ in range(trainer.world_size)] if group is not None else [mine]
        work = dist.all_gather(everyone, mine, group=group, async_op=True) if group is not None else None
        self._sent = everyone, work

    def _read(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self._sent is not None
        (everyone, work), self._sent = self._sent, None
        if work is not None:
            work.wait()
        self.report = _unpacked(everyone)
        rank, late, why = self.report.slowest()
        values = {"data_wait_seconds": max(self.report.data_wait), "straggler_seconds": late}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        seconds = max(self.report.step_seconds)
        self._seen = [*self._seen, rank][-self.patience :] if late >= self.share * seconds else []
        self.slow = [rank] if self._seen == [rank] * self.patience else []
        if self.slow:
            rank_zero_warn(
                f"rank {rank} on {self._hosts[rank]} is slow: the others wait {late:.3g} s of each step of {seconds:.3g} s "
                f"for it; {why}"
            )


def _unpacked(everyone: list[Tensor]) -> Report:
    recorded: list[Begun | None] = []
    for one in everyone:
        sent = one[_NUMBERS + 1 :].view(-1, 2)
        pairs = sent[sent[:, 0] >= 0].tolist()
        numbers, seconds = [int(number) for number, _ in pairs], [second for _, second in pairs]
        recorded.append(Begun(int(one[2]), numbers, seconds) if pairs else None)
    steps = [_steps_covered(one, found) for one, found in zip(everyone, recorded, strict=True)]
    late = [total / count for total, count in zip(lateness(recorded), steps, strict=True)]
    return Report([float(one[0]) for one in everyone], [float(one[1]) for one in everyone], late)


def _steps_covered(one: Tensor, recorded: Begun | None) -> float:
    """Steps that the sent collectives belong to: all, unless there were too many to send."""
    if recorded is None:
        return 1.0
    covered = (recorded.seconds[-1] - recorded.seconds[0]) / max(float(one[0]), 1e-9)
    return max(1.0, min(float(one[_NUMBERS]), covered))
