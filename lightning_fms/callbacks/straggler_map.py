"""A picture of who made others wait, and when: a row a rank, a column a look of `Straggler`.

One slow rank is a red line, a slow host is a band, a hiccup of the network is a red column; no list of numbers shows that. The
picture is kept small (the last 120 looks), so it costs kilobytes whatever the length of the run.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fms.callbacks.straggler import Report, Straggler

TAG = "stragglers"
LOOKS = 120
_CELL = 8  # pixels of a cell's side
_WORST = 0.5  # share of a step from which a cell is fully red


def shares_late(report: Report) -> Tensor:
    """By rank, the share of a step that the others waited for it, fp32 [ranks]."""
    return torch.tensor(report.late) / max(max(report.step_seconds), 1e-9)


def picture(looks: list[Tensor]) -> Tensor:
    """White where nobody waited, red where the others waited for half a step and more; uint8 [3, height, width].

    Args:
        looks: shares by rank, [ranks] each, oldest first.
    """
    heat_RL = (torch.stack(looks, dim=1) / _WORST).clamp(0, 1)
    others = (255 * (1 - heat_RL)).to(torch.uint8)
    colors_3RL = torch.stack((torch.full_like(others, 255), others, others))
    return colors_3RL.repeat_interleave(_CELL, 1).repeat_interleave(_CELL, 2)


class StragglerMap(L.Callback):
    """Show how late each rank was as an image `stragglers` in TensorBoard: ranks from the top, looks from left to right.

    Takes what `Straggler` found, at its pace; nothing without one, without a TensorBoard logger, or on one rank.
    """

    def __init__(self) -> None:
        self._looks: list[Tensor] = []
        self._last: Report | None = None
        self._straggler: Straggler | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find who looks."""
        found = (callback for callback in vars(trainer)["callbacks"] if isinstance(callback, Straggler))
        shown = trainer.is_global_zero and trainer.world_size > 1
        self._straggler = next(found, None) if shown else None
        self._looks, self._last = [], self._straggler.report if self._straggler else None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw again where there was a look."""
        if self._straggler is None or self._straggler.report is None or self._straggler.report is self._last:
            return
        self._last = self._straggler.report
        self._looks = [*self._looks, shares_late(self._last)][-LOOKS:]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(TAG, picture(self._looks), global_step=trainer.global_step)
