"""Is a resumed run the uninterrupted one, to the bit, on one GPU in deterministic mode?

    python benchmarks/determinism.py                       # half a minute
    python benchmarks/determinism.py --device cpu --steps 4

Trains `--steps` steps at once, and again in two halves with a checkpoint in between, in one process, for bf16, with fused kernels,
and with them in FP8; compares losses and weights. Dropout is on, so that random numbers count; the text is the standard
library's, streamed, with two workers.
"""

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import lightning as L
import torch
from torch import nn
from workload import ONLY_TRAIN

from lightning_fms.data import RescalableDataModule
from lightning_fms.data.sources import PythonSource
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM, Llama
from lightning_fms.precision import FP8Precision

ROWS, SEQ_LEN = 8, 512


class Losses(L.Callback):
    """The loss of each step, exactly."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def train(kind: str, device: str, steps: int, ckpt: Path | None = None, save: Path | None = None) -> Any:
    """(losses, weights) of a run up to `steps`, from the start or from a checkpoint."""
    L.seed_everything(0, verbose=False)
    net = Llama(257, 512, 4, 8, 4, 1536)
    for block in net.layers:
        block.ffn = nn.Sequential(block.ffn, nn.Dropout(0.1))
    module, losses = CausalLM(net, functools.partial(torch.optim.AdamW, lr=1e-3)), Losses()
    kernels = [TritonKernels(backend="auto" if device == "cuda" else "reference")] if "kernels" in kind else []
    fp8 = "fp8" in kind
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        strategy=FSDPCompileStrategy(),
        callbacks=[losses, *kernels],
        gradient_clip_val=1.0,
        deterministic=True,
        **ONLY_TRAIN,
        **(
            {"plugins": [FP8Precision("fused", emulate=device == "cpu", keep_small=False)]}
            if fp8
            else {"precision": "bf16-mixed"}
        ),
    )
    data = RescalableDataModule(
        {"prose": PythonSource("docstrings"), "code": PythonSource("code")},
        seq_len=SEQ_LEN if device == "cuda" else 64,
        global_batch_size=ROWS,
        tokenizer="bytes",
        num_workers=2,
        steps_per_epoch=1000,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    if save is not None:
        trainer.save_checkpoint(save)
    return losses.values, {name: value.cpu() for name, value in module.state_dict().items()}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "bf16+kernels", "fp8+kernels"])
    arguments = parser.parse_args(words)
    bad = 0
    for kind in arguments.kinds:
        run = functools.partial(train, kind, arguments.device)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "half.ckpt"
            losses, weights = run(arguments.steps)
            first, _ = run(arguments.steps // 2, save=saved)
            second, resumed = run(arguments.steps, ckpt=saved)
        apart = sum(not torch.equal(weights[name], resumed[name]) for name in weights)
        same = losses == first + second and not apart
        bad += not same
        print(
            f"{kind:14} {arguments.steps} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}: "
            + (
                "equal to the bit"
                if same
                else f"{apart} of {len(weights)} tensors differ, losses {losses} and {first + second}"
            ),
            flush=True,
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
