"""A board that is ready when it is opened: TensorBoard's page "Custom Scalars" with what belongs together in one chart.

A run logs some thirty figures, and TensorBoard shows them one by one in alphabetical order. Its custom scalars want a layout, an
event that names charts by patterns of tags. TensorBoard reads the first layout of a run only, so it is written once, at the first
step that is logged: by then the sources of the data are known, and each gets a chart of its share against its target.
"""

import re
from collections.abc import Collection
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fms.callbacks.cadence import StepClock, logging_due
from lightning_fms.callbacks.peaks import peak_of

Layout = dict[str, dict[str, list[Any]]]
# Chart by category, and patterns of the tags that are its lines.
_CHARTS: dict[str, dict[str, list[str]]] = {
    "Training": {
        "loss": ["^loss$", "^val_loss$"],
        "learning rate": ["^lr-"],
        "gradient norm before clipping": ["^grad_norm$"],
    },
    "Speed": {
        "tokens/s, all devices": ["^tokens_per_second$"],
        "TFLOP/s of a device": ["^tflops_per_device$"],
        "MFU": ["^mfu$"],
        "seconds a step": ["^step_seconds$", "^data_wait_seconds$", "^straggler_seconds$"],
        "goodput: share of the time that counts": ["^goodput$"],
        "communication not hidden behind compute": ["^exposed_"],
    },
    "FP8": {"largest weight, by layers": ["^fp8/weight_amax/"]},
    "Memory": {"GiB, the fullest rank": ["^memory_gib$", "^memory_reserved_gib$"]},
    "Data": {
        "share of tokens": ["^data/.+/share$"],
        "epochs": ["^data/.+/epoch$"],
        "left out, cut, padded": ["^data/(padding|split|cut|skipped)$"],
    },
}


def layout(sources: Collection[str], with_mfu: bool, with_fp8: bool = False) -> Layout:
    """Charts by category, in the form that `SummaryWriter.add_custom_scalars` takes.

    Args:
        sources: of the data; each gets a chart of its own.
        with_mfu: whether there is one.
        with_fp8: whether there are layers in FP8.
    """
    charts: Layout = {}
    for category, by_name in _CHARTS.items():
        if category == "FP8" and not with_fp8:
            continue
        charts[category] = {name: ["Multiline", tags] for name, tags in by_name.items() if with_mfu or name != "MFU"}
    for source in sources:
        tag = f"^data/{re.escape(source)}/"
        charts["Data"][f"{source}: share against target"] = ["Multiline", [f"{tag}share$", f"{tag}target$"]]
        charts["Data"][f"{source}: epoch of the slowest and fastest stream"] = [
            "Multiline",
            [f"{tag}epoch$", f"{tag}epoch_min$", f"{tag}epoch_max$"],
        ]
    return charts


class TensorBoardLayout(L.Callback):
    """Write the layout of TensorBoard's custom scalars, once, to each TensorBoard logger; nothing without one."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._written = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at the trainer's step."""
        self._clock.start(trainer)
        self._written = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the first step that is logged, on the first rank."""
        if self._written or not (self._clock.ended_step(trainer) and logging_due(trainer) and trainer.is_global_zero):
            return
        self._written = True
        shares = (re.fullmatch("data/(.+)/share", name) for name in trainer.callback_metrics)
        sources = [found[1] for found in shares if found]
        with_fp8 = any(name.startswith("fp8/") for name in trainer.callback_metrics)
        charts = layout(sources, peak_of(trainer.strategy.root_device) is not None, with_fp8)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_custom_scalars(charts)
