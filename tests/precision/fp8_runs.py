"""A tiny run through the Trainer, in FP8 or bf16: what the tests of the plugin share."""

import functools

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fms.models import CausalLM, Llama
from lightning_fms.precision import FP8Precision
from lightning_fms.precision.selection import computes_in_fp8

THIRD_PARTY_WARNINGS = [
    # Dynamo looks at `.grad` of every tensor and hides this warning, except where warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
STEPS = 12


class Counting(Dataset):
    """Rows that count upwards from different starts: learnable in a few steps."""

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = (torch.arange(33) + 7 * index) % 64
        return {"input_ids": line[:-1], "labels": line[1:]}


class TransformersModule(L.LightningModule):
    """A user's module around a model of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Losses(L.Callback):
    """What the run computed, seen from outside: losses, the output dtype of one layer, how many layers were FP8."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.float8_layers = 0
        self.dtypes: set[torch.dtype] = set()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
        self.float8_layers = sum(map(computes_in_fp8, linears))
        linears[0].register_forward_hook(lambda layer, args, output: self.dtypes.add(output.dtype))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: dict, *_: object) -> None:
        self.losses.append(outputs["loss"].item())


def causal_lm() -> CausalLM:
    return CausalLM(Llama(64, 64, 2, 4, 2), functools.partial(torch.optim.AdamW, lr=3e-3))


def trainer(*, fp8: FP8Precision | None, **options: object) -> tuple[L.Trainer, Losses]:
    losses = Losses()
    precision = {"plugins": [fp8]} if fp8 else {"precision": "bf16-mixed"}
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "callbacks": [losses], "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(**(defaults | quiet | precision | options)), losses


def fit(fp8: FP8Precision | None, module: L.LightningModule, **options: object) -> Losses:
    run, losses = trainer(fp8=fp8, **options)
    run.fit(module, DataLoader(Counting(), batch_size=4))
    return losses


def plugin(recipe: str = "tensorwise", **options: object) -> FP8Precision:
    return FP8Precision(recipe, emulate=True, keep_small=False, **options)
