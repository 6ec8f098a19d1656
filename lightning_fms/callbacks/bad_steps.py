"""Steps that would harm the model: found before the optimizer makes them, and left out on all ranks alike.

A NaN in one gradient is in every weight after one step. A spike, a loss or a gradient norm far outside of what the last steps
had, is seldom that final, but can cost days. Both are judged before the optimizer steps, by the mean loss and the norm of the
whole gradient, which a reduction makes the same number on all ranks. What is far is measured by a robust z-score: the
distance from the median of a window in units of its median absolute deviation, which spikes inside the window do not move.

*Skip* drops the gradients, so that the optimizer finds nothing to do: weights, moments and their step counts stay as they are,
while the data, the step number and the learning-rate schedule go on. *Roll back* also loads the weights and the optimizer of
the newest committed checkpoint, as PaLM did by hand (https://arxiv.org/abs/2204.02311, section 5.1); data, step number and
schedule go on here, too, so the rows since that checkpoint count as read and are not read again. Step `n` of a run always
reads the same rows, whatever was skipped, so `fms-data audit` names the documents of a step that is on record.

The figures are read from the device once a step, which waits for the backward pass.
"""

import json
import math
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fms.gradient_norm import total_norm
from lightning_fms.local_paths import local_path

# Of the median absolute deviation of a normal distribution to its standard deviation.
_MAD_TO_SIGMA = 1.4826
# Where a window is all but constant, what is that close to its median is no spike.
_RELATIVE_FLOOR = 1e-3


class TooManyBadSteps(RuntimeError):
    """Skipping does not help; raised on all ranks."""


class Window:
    """The last good values of a figure."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)

    def z(self, value: float) -> float:
        """How far above the median a value is, in robust standard deviations; 0 until the window is full."""
        if len(self.values) < (self.values.maxlen or 0):
            return 0.0
        middle = median(self.values)
        spread = _MAD_TO_SIGMA * median(abs(v - middle) for v in self.values)
        return (value - middle) / max(spread, _RELATIVE_FLOOR * abs(middle), 1e-30)


class BadSteps(L.Callback):
    """Skip steps with a non-finite loss or gradient, and on request spikes; or roll back to the newest checkpoint.

    Args:
        path: a file that gets a line of JSON for each bad step: `time`, `step` (counted from 0, as for `fms-data audit`),
            `first_row`, `rows`, `loss`, `grad_norm`, `reason`, `action`, and for a rollback `restored`, the optimizer steps done
            at the checkpoint. `None` keeps no record.
        spike: robust z-score of the loss or the gradient norm from which a step is bad. `None` = only what is not finite. 20 is
            seldom wrong; a warm-up may need more.
        window: good steps that a spike is measured against; there are no spikes before there are so many.
        on_bad: `"skip"`, or `"rollback"`, which needs `StepCheckpoint`; without a checkpoint yet, a rollback is a skip.
        max_in_a_row: bad steps in a row after which the run ends with `TooManyBadSteps`.
        max_total: bad steps of a run, over all its attempts, after which it ends so.

    Raises:
        ValueError: for numbers below 1, another `on_bad`, and in `fit` a rollback that nobody has saved for, or a precision
            with a gradient scaler, which overflows now and then and skips those steps itself.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        spike: float | None = None,
        window: int = 100,
        on_bad: str = "skip",
        max_in_a_row: int = 10,
        max_total: int = 100,
    ) -> None:
        for name, value in (("window", window), ("max_in_a_row", max_in_a_row), ("max_total", max_total)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if spike is not None and spike <= 0:
            raise ValueError(f"{spike=}: must be above 0, or null for non-finite values only")
        if on_bad not in ("skip", "rollback"):
            raise ValueError(f"{on_bad=}: give 'skip' or 'rollback'")
        self.path, self.spike, self.on_bad = local_path(path, "BadSteps") if path is not None else None, spike, on_bad
        self.max_in_a_row, self.max_total = max_in_a_row, max_total
        self.in_a_row = self.total = 0
        self._losses, self._norms = Window(window), Window(window)
        self._loss: Tensor | None = None
        self._has_targets: Tensor | None = None
        self._bad: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Counts and windows, so that a resumed run judges as the uninterrupted one."""
        windows = {"losses": list(self._losses.values), "norms": list(self._norms.values)}
        return {"in_a_row": self.in_a_row, "total": self.total, **windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.in_a_row, self.total = state_dict["in_a_row"], state_dict["total"]
        self._losses.values.extend(state_dict["losses"])
        self._norms.values.extend(state_dict["norms"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that a rollback has something to roll back to, and that what is not finite means something."""
        self._loss = self._bad = None
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"BadSteps counts as bad the overflows by which the gradient scaler of {trainer.precision_plugin.precision!r} "
                "finds its scale: train in 'bf16-mixed', or leave BadSteps out"
            )
        if self.on_bad == "rollback" and _saver(trainer) is None:
            raise ValueError("BadSteps(on_bad='rollback') has no checkpoints to go back to: add StepCheckpoint")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note whether anything in the micro-batch counts: the mean over no targets is NaN, and harmless."""
        labels = batch.get("labels") if isinstance(batch, dict) else None
        self._has_targets = (labels != -100).any() if isinstance(labels, Tensor) else None

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Add up the loss of the step; Lightning has divided it by the number of micro-batches."""
        loss = loss.detach().float()
        if self._has_targets is not None:
            loss = torch.where(self._has_targets, loss, torch.zeros_like(loss))
        self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Judge the step that is about to be made, and take its gradients away if it is bad."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm(p.grad for p in parameters)
        loss = self._loss if self._loss is not None else torch.zeros_like(norm)
        self._loss = None
        figures = torch.stack([loss.to(norm.device), norm.float()]).to(trainer.strategy.root_device)
        mean = trainer.strategy.reduce(figures, reduce_op="mean")
        assert isinstance(mean, Tensor)
        value, size = mean.tolist()
        reason = self._judge(value, size)
        if reason is None:
            self.in_a_row = 0
            return
        for parameter in parameters:
            parameter.grad = None
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        self._bad = {"step": trainer.global_step, **_rows_of(trainer), "loss": value, "grad_norm": size}
        self._bad["reason"] = reason

    def _judge(self, loss: float, norm: float) -> str | None:
        """Why a step is bad, `None` for a good one, whose figures then count for those to come."""
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        for name, value, window in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            z = window.z(value)
            if self.spike is not None and z >= self.spike:
                return f"{name} {value:.4g} is {z:.1f} deviations above the median"
        self._losses.values.append(loss)
        self._norms.values.append(norm)
        return None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Behind a bad step: roll back if that is asked for, write it down, and give up where there are too many."""
        if self._bad is None:
            return
        bad, self._bad = self._bad, None
        bad["action"] = "skip"
        newest = _saver(trainer).newest(trainer) if self.on_bad == "rollback" else None
        if newest is not None:
            step, path = newest
            roll_back(trainer, path)
            bad |= {"action": "rollback", "restored": step}
        self._record(trainer, bad)
        rank_zero_warn(f"step {bad['step']} was bad ({bad['reason']}): {bad['action']}")
        for count, most, what in (
            (self.in_a_row, self.max_in_a_row, "in a row"),
            (self.total, self.max_total, "in this run"),
        ):
            if count >= most:
                raise TooManyBadSteps(
                    f"{count} bad steps {what}, the last one is step {bad['step']}: {bad['reason']}; see {self.path}"
                )

    def _record(self, trainer: L.Trainer, bad: dict[str, Any]) -> None:
        if self.path is None or not trainer.is_global_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **bad}
        for name in ("loss", "grad_norm"):
            line[name] = line[name] if math.isfinite(line[name]) else str(line[name])  # JSON has no NaN
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def roll_back(trainer: L.Trainer, path: Path) -> None:
    """Load weights and optimizer state of a checkpoint in place; settings that a schedule has made stay. Collective."""
    optimizers = trainer.strategy.optimizers
    settings = [[{**group, "params": None} for group in optimizer.param_groups] for optimizer in optimizers]
    loaded = trainer.strategy.load_checkpoint(
        path
    )  # ours has loaded by then; stock strategies hand over what they read
    if "state_dict" in loaded:
        trainer.strategy.load_model_state_dict(loaded, strict=True)
        trainer.strategy.load_optimizer_state_dict(loaded)
    for optimizer, kept in zip(optimizers, settings, strict=True):
        for group, former in zip(optimizer.param_groups, kept, strict=True):
            group.update({name: value for name, value in former.items() if name != "params"})


def _saver(trainer: L.Trainer) -> Any:
    return next((callback for callback in vars(trainer)["callbacks"] if hasattr(callback, "newest")), None)


def _rows_of(trainer: L.Trainer) -> dict[str, int]:
    """The rows of the step that is being made, where the data module knows them."""
    loader = getattr(getattr(trainer, "datamodule", None), "loader", None)
    if not hasattr(loader, "slots"):
        return {}
    return {"first_row": int(loader.state_dict()["header"]["row"]), "rows": int(loader.slots.batch)}  # type: ignore[union-attr]
