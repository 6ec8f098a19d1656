"""What a run is, in TensorBoard beside what it does: its config as text, and its settings as a row of HParams.

The page HParams compares runs by their settings, so it gets those that one compares runs by, and not two hundred keys: those
are in the text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard.summary import hparams

from lightning_fms.launch.words import override_of

# By the key in the config; a group that is chosen by name is told by what it names.
_SETTINGS = (
    "name", "seed", "depth", "model.net.dim", "model.net.n_layers", "optimizer.lr", "optimizer.weight_decay",
    "trainer.max_steps", "trainer.gradient_clip_val", "data.seq_len", "data.global_batch_size", "data.micro_batch_size",
    "data.packing", "data.tokenizer", "precision.name", "precision.recipe", "strategy.replicate", "strategy.shard",
    "strategy.tensor", "strategy.activation_checkpointing", "strategy.cpu_offload", "strategy.activation_offload",
)  # fmt: skip
_NAMED = ("model", "optimizer", "scheduler", "strategy", "precision", "kernels")
_METRICS = ("loss", "val_loss", "tokens_per_second", "mfu", "memory_gib", "goodput")


def settings_of(plain: Mapping[str, Any], ranks: int) -> dict[str, bool | int | float | str]:
    """The settings of a run that HParams shows, by key.

    Args:
        plain: the resolved config.
        ranks: processes of the run.
    """
    found: dict[str, Any] = {"ranks": ranks}
    for group in _NAMED:
        target = (plain.get(group) or {}).get("_target_")
        if target is not None:
            found[group] = str(target).rpartition(".")[2]
    for key in _SETTINGS:
        node: Any = plain
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            found[key] = node if isinstance(node, bool | int | float) else str(node)
    return found


class TensorBoardRecord(L.Callback):
    """Write both when a fit starts, on the first rank, to each TensorBoard logger.

    Args:
        config: of the run.
        overrides: the command line that it was composed from.
        program: what the command line began with.
    """

    def __init__(self, config: DictConfig, overrides: Sequence[str], program: str) -> None:
        self.config, self.overrides, self.program = config, overrides, program

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Everything is set up, so what follows is a run."""
        loggers = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if not trainer.is_global_zero or not loggers:
            return
        plain = OmegaConf.to_container(self.config, resolve=True)
        assert isinstance(plain, dict)
        command = " ".join([self.program, *self.overrides, override_of("paths.run", plain["paths"]["run"])])
        text = "\n".join(
            f"    {line}" for line in [f"# {command}", *OmegaConf.to_yaml(self.config, resolve=True).splitlines()]
        )
        settings = settings_of({str(key): value for key, value in plain.items()}, trainer.world_size)
        for logger in loggers:
            logger.experiment.add_text("config", text, global_step=trainer.global_step)
            for summary in hparams(settings, dict.fromkeys(_METRICS, 0.0)):
                logger.experiment._get_file_writer().add_summary(summary)  # as Lightning itself does
