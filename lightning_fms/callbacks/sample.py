"""A sample of what the model writes, at the end of training: a loss of 1.9 says little, a line of text says more.

Under a sharded strategy a forward is a collective, so every rank generates the same text and the first one shows it.
Afterwards the shards are restored: FSDP leaves the root's parameters gathered after a forward without a backward, and a
checkpoint that is written next must not see that.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(module: nn.Module) -> None:
    """Bring every FSDP2 module back to its shards; other modules are left alone."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class _Reached(Exception):
    """`generate` has accepted its arguments and asked for the first logits."""


def _probe(ids: torch.Tensor) -> torch.Tensor:
    raise _Reached


class Sample(L.Callback):
    """Generate text when training ends, print it, and log it to TensorBoard as `sample`.

    The tokenizer is the data module's (`trainer.datamodule.tokenizer`, with `encode`, `decode` and `eos_id`).

    Args:
        generate: `generate(forward, prompt, eos_id=..., device=...)` returns new token ids; it must call `forward` (token
            ids [1, T] -> logits [1, T, V]) equally often on every rank. E.g. a partial of `lightning_fms.models.generate`.
        prompt: the text to go on from.

    Attributes:
        text: what was generated last, without the prompt.

    Raises:
        ValueError: for an empty prompt; at the start of a fit, for a data module without a tokenizer, a prompt without
            tokens, and whatever `generate` refuses before its first forward. At the end it would cost the last checkpoint.
    """

    def __init__(self, generate: Callable[..., list[int]], prompt: str = "The ") -> None:
        if not prompt:
            raise ValueError(f"{prompt=}: generation needs some text to start from")
        self.generate, self.prompt = generate, prompt
        self.text: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Go through everything up to the first forward."""
        if stage != "fit":
            return
        tokenizer = self._tokenizer(trainer)
        tokens = self._encoded(tokenizer)
        if not tokens:
            raise ValueError(f"Sample: prompt={self.prompt!r} has no tokens; give text that the tokenizer knows")
        with suppress(_Reached):
            self.generate(_probe, tokens, eos_id=tokenizer.eos_id, device="cpu")

    def _tokenizer(self, trainer: L.Trainer) -> Any:
        tokenizer: Any = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is None:
            raise ValueError("Sample: the data module has no tokenizer; give it one, or leave the callback out")
        return tokenizer

    def _encoded(self, tokenizer: Any) -> list[int]:
        return [int(token) for token in tokenizer.encode(self.prompt)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Generate on every rank, show on the first."""
        tokenizer = self._tokenizer(trainer)
        was_training = pl_module.training
        pl_module.eval()
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            new = self.generate(
                pl_module,
                self._encoded(tokenizer),
                eos_id=tokenizer.eos_id,
                device=pl_module.device,
            )
        reshard(pl_module)
        pl_module.train(was_training)
        self.text = tokenizer.decode(new)
        if trainer.is_global_zero:
            print(f"\n{self.prompt}{self.text}\n", flush=True)
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("sample", f"**{self.prompt}**{self.text}", trainer.global_step)
