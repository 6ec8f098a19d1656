"""A small plain LightningModule, fixed data, and a recorder: what all Trainer tests here train."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.distributed import FSDPCompileStrategy

V, D, T, ROWS = 29, 12, 5, 6  # vocabulary, width, tokens a row, rows of a global batch (divisible by 1, 2, 3)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x_BTD)))))


class Tiny(pl.LightningModule):
    def __init__(self, dropout: float = 0.0, tied: bool = False, n_layers: int = 3, width: int = V) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, D)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, width, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))

    def loss(self, batch: Tensor) -> Tensor:
        logits_BTV = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).float().argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"},
        }


class Rows:
    """Micro-batches of one rank, resumable: batch `i` is its share of the six rows that all ranks together see at `i`."""

    def __init__(self, batches: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._rows = torch.randint(0, V, (batches, ROWS, T + 1), generator=generator)[:, rank::world]
        self._start = self._done = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Tensor]:
        start, self._start = self._start, 0
        for index in range(start, len(self)):
            self._done = index + 1
            yield self._rows[index]

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["done"] % len(self)


@dataclass
class Run:
    """Losses, gradients (whole, after accumulation and reduction, before clipping) and end weights of a run."""

    losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.run = Run()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.run.gradients.append({n: whole(p.grad) for n, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if "loss" in trainer.callback_metrics:
            self.run.losses.append(float(trainer.callback_metrics["loss"]))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if "val_loss" in trainer.callback_metrics:
            self.run.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.run.weights = whole_weights(pl_module)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def trainer(recorder: pl.Callback | None = None, strategy: Any = None, **options: Any) -> pl.Trainer:
    callbacks = [*options.pop("callbacks", []), *([recorder] if recorder is not None else [])]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": strategy if strategy is not None else FSDPCompileStrategy(),
        "callbacks": callbacks,
        "max_steps": 4,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(type(c).__name__ == "ModelCheckpoint" for c in callbacks),
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(**{**defaults, **options})


def fit(
    make: Callable[[], pl.LightningModule] = Tiny,
    *,
    strategy: Any = None,
    batches: int = 8,
    ckpt_path: Any = None,
    save: Any = None,
    **options: Any,
) -> Run:
    """Train a freshly seeded module and say what happened."""
    pl.seed_everything(7, verbose=False)
    module, recorder = make(), Recorder()
    t = trainer(recorder, strategy, **options)
    t.fit(module, Rows(batches), Rows(2, seed=1), ckpt_path=ckpt_path)
    if save is not None:
        t.save_checkpoint(save)
    return recorder.run
