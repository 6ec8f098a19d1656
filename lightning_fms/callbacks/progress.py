"""What a run shows in the terminal: columns that can be read from across the room.

A line of the first step, and every few steps from there, stays on the screen, and so in a log file; on a terminal a live line
below it follows in between, twice a second at most. Reading a loss from a device waits for the device, so values are read
only for a line that is shown. Figures come from what other callbacks logged: a column without a figure stays empty. They are
logged on logging steps only, so in between a line that stays leaves them out, and the live line says of which step they are.

The wait for data is the share of the time since the line before that the host spent fetching batches; see `data_clock`.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from lightning_fms.callbacks.cadence import StepClock, logging_due
from lightning_fms.callbacks.data_clock import DataWait, data_wait_of, end_data_clock
from lightning_fms.callbacks.peaks import peak_of

REFRESH_SECONDS = 0.5
DATA_WAIT = "data_wait"


def short_count(number: float) -> str:
    """1234567 -> '1.23M'."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.3g}"


def short_time(seconds: float) -> str:
    """4000 -> '1:06:40'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Title, width, the metric it shows, how.
Column = tuple[str, int, str, Callable[[float], str]]
COLUMNS: tuple[Column, ...] = (
    ("loss", 9, "loss", "{:.4f}".format),
    ("lr", 10, "lr", "{:.2e}".format),
    ("grad norm", 11, "grad_norm", "{:.3g}".format),
    ("tokens/s", 10, "tokens_per_second", short_count),
    ("TFLOP/s", 9, "tflops_per_device", "{:.3g}".format),
    ("MFU", 8, "mfu", "{:.1%}".format),
    ("memory", 11, "memory_gib", "{:.2f} GiB".format),
    ("data wait", 11, DATA_WAIT, "{:.1%}".format),
)


def columns_for(device: torch.device) -> tuple[Column, ...]:
    """The columns that can have a figure on a device, and say something."""
    hidden = {"mfu"} if peak_of(device) is None else set()
    hidden |= {"tflops_per_device"} if device.type != "cuda" else set()
    return tuple(column for column in COLUMNS if column[2] not in hidden)


def render(step: int, metrics: dict[str, float], left: float | None, columns: tuple[Column, ...]) -> str:
    """One row of the table."""
    cells = [f"{step:>9}"]
    cells += [f"{show(metrics[name]) if name in metrics else '':>{width}}" for _, width, name, show in columns]
    return "".join(cells) + f"{short_time(left) if left is not None else '':>10}"


class Progress(ProgressBar):
    """Step, loss, learning rate, gradient norm, tokens/s, memory, wait for data, time left.

    On GPUs also TFLOP/s of each, and MFU where the peak is known.

    Args:
        every_n_steps: optimizer steps between two lines that stay. 20: seldom enough that reading the loss costs
            nothing, often enough to watch.
        stream: where to write. `None` = standard output.

    Raises:
        ValueError: for a number of steps below 1.
    """

    def __init__(self, every_n_steps: int = 20, stream: TextIO | None = None) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"{every_n_steps=}: must be at least 1")
        self.every_n_steps = every_n_steps
        self._stream = stream
        self._enabled = True
        self._clock = StepClock()
        self._first: tuple[int, float] | None = None
        self._shown = 0.0
        self._live = 0
        self._columns: tuple[Column, ...] = ()
        self._data_wait: DataWait | None = None
        self._waited, self._line_at = 0.0, 0.0

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show lines again."""
        self._enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """What `LightningModule.print` prints, above the live line."""
        self._line(sep.join(map(str, args)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The head of the table."""
        self._clock.start(trainer)
        self._first, self._shown = None, 0.0
        self._data_wait, self._waited, self._line_at = data_wait_of(trainer), 0.0, time.monotonic()
        self._columns = columns_for(trainer.strategy.root_device)
        titles = "".join(f"{title:>{width}}" for title, width, _, _ in self._columns)
        self._line(f"{'step':>9}{titles}{'left':>10}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A line of the first step and every `every_n_steps`; on a terminal a live one in between."""
        now = time.monotonic()
        if not (self._clock.ended_step(trainer) and self._enabled):
            return
        stays = trainer.global_step % self.every_n_steps == 0 or trainer.global_step == trainer.max_steps
        if self._first is None:
            self._first, stays = (trainer.global_step, now), True
        if not stays and not (self._terminal() and now - self._shown >= REFRESH_SECONDS):
            return
        self._shown = now
        fresh = logging_due(trainer)
        metrics = metrics_of(trainer, outputs, logged=fresh or not stays)
        assert self._data_wait is not None
        self._waited += self._data_wait.take()
        metrics[DATA_WAIT] = self._waited / max(now - self._line_at, 1e-9)
        if stays:
            self._waited, self._line_at = 0.0, now
        row = render(trainer.global_step, metrics, self._left(trainer, now), self._columns)
        self._line(row) if stays else self._live_line(row + ("" if fresh else _of_step(trainer)))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The validation metrics, in a line of their own."""
        if not trainer.sanity_checking:
            found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
            self._line(
                f"{trainer.global_step:>9}  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave no live line behind."""
        self._clear()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave no live line behind, and nothing that listens."""
        self._clear()
        end_data_clock(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave nothing that listens."""
        end_data_clock(trainer)

    def _left(self, trainer: L.Trainer, now: float) -> float | None:
        assert self._first is not None
        step, since = self._first
        done = trainer.global_step - step
        return (
            (trainer.max_steps - trainer.global_step) * (now - since) / done if done and trainer.max_steps > 0 else None
        )

    @property
    def _out(self) -> TextIO:
        return sys.stdout if self._stream is None else self._stream

    def _terminal(self) -> bool:
        return self._out.isatty()

    def _clear(self) -> None:
        if self._live and self._enabled:
            self._out.write("\r" + " " * self._live + "\r")
            self._out.flush()
        self._live = 0

    def _line(self, text: str) -> None:
        if self._enabled:
            self._clear()
            self._out.write(text + "\n")
            self._out.flush()

    def _live_line(self, text: str) -> None:
        self._out.write("\r" + text.ljust(self._live))
        self._out.flush()
        self._live = len(text)


def _of_step(trainer: L.Trainer) -> str:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    step = trainer.global_step - trainer.global_step % every if every > 0 else 0
    return f"  (logged at step {step})" if step else ""


def metrics_of(trainer: L.Trainer, outputs: Any, logged: bool = True) -> dict[str, float]:
    """The figures of a row. Reads from the device.

    The loss is `loss` where something logs it (the exact mean over ranks and micro-batches), else that of this rank's
    last micro-batch. The learning rate is that of now.

    Args:
        trainer: whose metrics.
        outputs: of the last training step.
        logged: whether to show what was logged last.
    """
    names = {name for name in trainer.callback_metrics if name in {column[2] for column in COLUMNS}}
    metrics = {name: float(trainer.callback_metrics[name]) for name in names if logged}
    last = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if "loss" not in names and isinstance(last, Tensor):
        # Lightning has divided it for accumulation.
        metrics["loss"] = float(last) * trainer.accumulate_grad_batches
    if trainer.optimizers:
        metrics["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
    return metrics
