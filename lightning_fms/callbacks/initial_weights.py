"""Begin a run with weights from somewhere else: continued pre-training, fine-tuning, a longer context.

A checkpoint that is *resumed* brings optimizer, step and data position; these begin anew here. What brings the weights into a
sharded model is the strategy's business: the callback only says when, after the module is placed and before anything that is
resumed, which then wins.
"""

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_fms.remote_path import place


class InitialWeights(L.Callback):
    """Load weights at the start of a fit that resumes nothing.

    Args:
        path: a checkpoint of `FSDPCompileStrategy`, a file or folder of safetensors (Hugging Face's names are understood), or a
            plain Lightning file.
        strict: refuse tensors that are missing or over.

    Raises:
        ValueError: at the start of a fit under a strategy that cannot load weights into the module as it is.
    """

    def __init__(self, path: str, strict: bool = True) -> None:
        self.path, self.strict = path, strict

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load, unless a checkpoint is resumed or the fit goes on."""
        if trainer.ckpt_path is not None or trainer.global_step > 0:
            return
        load = getattr(trainer.strategy, "load_weights", None)
        if load is None:
            raise ValueError(
                f"InitialWeights({self.path!r}) under {type(trainer.strategy).__name__}: it has no load_weights; use "
                "FSDPCompileStrategy, or load the state dict in your module"
            )
        count = load(place(self.path), self.strict)
        rank_zero_info(f"initial weights: {count} tensors from {self.path}")
