"""A trace of a few steps, on request: what ran when, on the host and on the device.

A profiler slows down what it sees and writes megabytes a step, so it sees few steps, well behind the compilation, and only where
it is asked for. The trace opens in https://ui.perfetto.dev or chrome://tracing; a table beside it has the slowest operations.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_warn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lightning_fms.callbacks.cadence import StepClock
from lightning_fms.callbacks.overlap import Overlap
from lightning_fms.callbacks.throughput import synchronize
from lightning_fms.local_paths import local_path

_ROWS = 40
_NAMED = 3


class Profiler(L.Callback):
    """Write `<dirpath>/step-<n>.rank-<r>.json.gz` (a trace) and `.txt` (a table) of some optimizer steps.

    Args:
        dirpath: folder of the traces.
        at_step: optimizer steps of this fit before the first that is seen. 10: behind compilation and the allocator's first rounds.
        steps: optimizer steps that are seen.
        ranks: which write one.
        memory: whether to note what each operation allocates.
        stacks: whether to note who called it; slower, and a much larger file.

    Raises:
        ValueError: for numbers below 1; when a fit starts: beside `Overlap` or Lightning's PyTorchProfiler: a process has one.
    """

    def __init__(
        self,
        dirpath: str | Path,
        at_step: int = 10,
        steps: int = 3,
        ranks: list[int] | tuple[int, ...] = (0,),
        memory: bool = False,
        stacks: bool = False,
    ) -> None:
        for name, value in (("at_step", at_step), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.folder = local_path(dirpath, "Profiler")
        self.at_step, self.steps, self.ranks = at_step, steps, tuple(ranks)
        self.memory, self.stacks = memory, stacks
        self._clock = StepClock()
        self._seen, self._done = 0, False
        self._profile: profile | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a second profiler."""
        others = [
            type(c).__name__ for c in vars(trainer)["callbacks"] if isinstance(c, Overlap) and c.at_step is not None
        ]
        others += (
            ["Trainer(profiler=PyTorchProfiler)"] if isinstance(vars(trainer)["profiler"], PyTorchProfiler) else []
        )
        if others:
            raise ValueError(f"Profiler beside {others[0]}: a process has one profiler; leave one of the two out")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count from here."""
        self._clock.start(trainer)
        self._seen, self._done = 0, trainer.global_rank not in self.ranks

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin and end between two optimizer steps."""
        if self._done or not self._clock.ended_step(trainer):
            return
        self._seen += 1
        if self._profile is not None and self._seen >= self.at_step + self.steps:
            self._write(trainer)
        elif self._profile is None and self._seen >= self.at_step:
            self._begin(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say if the run was too short."""
        if self._profile is not None and self._seen > self.at_step:
            self._write(trainer)
        if not self._done:
            self._drop()
            rank_zero_warn(
                f"profiler: no trace: the run had {self._seen} optimizer steps, and the first to be seen is {self.at_step + 1}; "
                "lower at_step"
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no profiler running."""
        self._drop()

    def _begin(self, trainer: L.Trainer) -> None:
        device = trainer.strategy.root_device
        synchronize(device)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities, profile_memory=self.memory, with_stack=self.stacks)
        self._profile.start()

    def _drop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, trainer: L.Trainer) -> None:
        assert self._profile is not None
        device = trainer.strategy.root_device.type
        synchronize(trainer.strategy.root_device)
        done, seen = self._profile, self._seen - self.at_step
        self._drop()
        self._done = True
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{trainer.global_step}.rank-{trainer.global_rank}.json.gz"
        done.export_chrome_trace(str(path))
        order = f"self_{device if device == 'cuda' else 'cpu'}_time_total"
        averages = done.key_averages()
        path.with_suffix("").with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=_ROWS))
        most = ", ".join(f"{name} {share:.0%}" for name, share in shares(averages, device)[:_NAMED])
        print(f"profiler: {seen} steps in {path} (open in https://ui.perfetto.dev); most time: {most}", flush=True)


def shares(averages: Iterable[Any], device: str) -> list[tuple[str, float]]:
    """Operations and their share of the time, the largest first.

    Args:
        averages: `profile.key_averages()`.
        device: whose time; on `cuda` that of the kernels which an operation starts. A profile holds these twice more, as the
            kernels themselves and within ranges such as the optimizer's step, whose gaps count as theirs; both are left out.
    """
    if device == "cuda":
        kept = (e for e in averages if e.device_type == DeviceType.CPU and not e.is_user_annotation)
        times = [(e.self_device_time_total, e.key) for e in kept]
    else:
        times = [(e.self_cpu_time_total, e.key) for e in averages]
    total = sum(time for time, _ in times) or 1.0
    return [(name, time / total) for time, name in sorted(times, reverse=True)]
