"""A run of the suite's Llama on random tokens, for measurements where the text does not matter: no reading, no tokenizing."""

import logging
import warnings
from collections.abc import Iterator, Sequence

import lightning as L
import torch
from step_meter import StepMeter
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from trainer_run import Metered
from workload import CLIP_NORM, ONLY_TRAIN, SEED, Shape, adamw, settle, warm_up

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM


class RandomTokens(IterableDataset):
    """Micro-batches of one rank, without end, made on the host."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        size = (self.shape.rows, self.shape.seq_len + 1)
        while True:
            rows = torch.randint(self.shape.vocab_size, size, generator=generator)
            yield {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def train(
    shape: Shape,
    strategy: FSDPCompileStrategy,
    device: str,
    devices: int,
    steps: int,
    warmup: int,
    rank: int = 0,
    callbacks: Sequence[L.Callback] = (),
) -> StepMeter:
    """Train in bf16 with the fused kernels, so that activations and not the logits decide the peak; returns the ruler."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(SEED, verbose=False)
    settle(torch.device(device))
    meter = StepMeter(torch.device(device), warmup, steps, explain=False)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=devices,
        max_steps=steps,
        strategy=strategy,
        precision="bf16-mixed",
        callbacks=[TritonKernels(backend="auto" if device == "cuda" else "reference"), Metered(meter), *callbacks],
        gradient_clip_val=CLIP_NORM,
        **ONLY_TRAIN,
    )
    trainer.fit(CausalLM(shape.model(), adamw, warm_up), DataLoader(RandomTokens(shape, SEED + rank), batch_size=None))
    return meter
