"""The identical-loss proof: what each mesh computes, beside one process with stock Lightning.

    python benchmarks/parity.py                          # 1, 2, 3, 4 and 6 processes on CPU, gloo
    python benchmarks/parity.py --worlds 1 2
    python benchmarks/parity.py --device cuda            # on the GPUs that there are, NCCL
    python benchmarks/parity.py --precision bf16-mixed   # differs by bf16's rounding, nothing more

A small Llama of the suite takes five optimizer steps of two micro-batches, clipped, on every mesh `replicate x shard x tensor`
that the number of processes admits: FSDP, HSDP, tensor, and their products. All ranks together see the same rows as the one
process. A row shows the losses and the norms of the gradients before clipping, and their largest relative difference from the
first row. One beyond `--tolerance` ends with exit code 1. Sums are taken in another order, so fp32 agrees to some 1e-7 and not to
the bit.
"""

import argparse
import functools
import itertools
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # imports that look for GPUs must not start CUDA: ranks are forked

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from workload import ONLY_TRAIN

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.mesh import MeshShape
from lightning_fms.gradient_norm import total_norm
from lightning_fms.models import CausalLM, Llama
from lightning_fms.tables import table

sys.path.append(str(Path(__file__).parents[1]))
from tests.worlds import run_world

WORLDS = (1, 2, 3, 4, 6)
STEPS, MICRO_BATCHES, ROWS, TOKENS, VOCABULARY = 5, 2, 24, 24, 96  # rows of a micro-batch divide by 1, 2, 3, 4, 6, 8
CLIP_NORM = 0.5  # below the norms, so that every step is clipped
TOLERANCE = {"32-true": 2e-5, "bf16-mixed": 3e-2}
adamw = functools.partial(torch.optim.AdamW, lr=3e-3)


@dataclass
class Curve:
    """Of each optimizer step: mean loss of all rows, norm of the gradient before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Watch(L.Callback):
    """Keeps the curve of a run."""

    def __init__(self) -> None:
        self.curve = Curve()
        self._losses: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.curve.norms.append(float(total_norm(p.grad for p in module.parameters() if p.grad is not None)))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach() * MICRO_BATCHES, reduce_op="mean")
        self._losses.append(float(loss))
        if len(self._losses) == MICRO_BATCHES:
            self.curve.losses.append(sum(self._losses) / MICRO_BATCHES)
            self._losses.clear()


def meshes(world: int) -> Iterator[MeshShape]:
    """All ways to lay out the processes, tensor ranks by two: FSDP, HSDP, tensor, and their products."""
    for tensor, replicate in itertools.product((1, 2), range(1, world + 1)):
        if world % (tensor * replicate) == 0 and (replicate == 1 or replicate < world):
            yield MeshShape(replicate, world // (tensor * replicate), tensor)


def micro_batches(rank: int, ranks: int) -> Iterator[dict[str, Tensor]]:
    """The rows of one data rank; those of all data ranks together are the same for every mesh."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS * MICRO_BATCHES):
        rows = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=generator)[rank::ranks]
        yield {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def train(strategy: Any, world: int, rank: int, ranks: int, device: str, precision: Any) -> Curve:
    """Five steps of the freshly seeded model."""
    L.seed_everything(7, verbose=False)
    net = Llama(VOCABULARY, 32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, init_std=0.3)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=world,
        strategy=strategy,
        precision=precision,
        callbacks=[watch],
        max_steps=STEPS,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP_NORM,
        **ONLY_TRAIN,
    )
    trainer.fit(CausalLM(net, adamw), DataLoader(list(micro_batches(rank, ranks)), batch_size=None))
    return watch.curve


def stock(device: str, precision: str) -> Curve:
    """One process, without the strategy."""
    _quieten()
    return train("auto", 1, 0, 1, device, precision)


def on_meshes(shapes: Sequence[MeshShape], device: str, precision: str) -> list[Curve]:
    """This rank's curve on each mesh; all ranks have the same."""
    _quieten()
    rank, curves = int(os.environ["RANK"]), []
    for shape in shapes:
        strategy = FSDPCompileStrategy(shape.replicate, shape.shard, shape.tensor, compile=device == "cuda")
        data_rank = rank // shape.tensor
        curves.append(train(strategy, shape.processes, data_rank, shape.data_parallel, device, precision))
    return curves


def _quieten() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def difference(curve: list[float], reference: list[float]) -> float:
    """Largest relative difference of two curves."""
    assert len(curve) == len(reference) == STEPS
    ours, theirs = torch.tensor(curve, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    return float(((ours - theirs) / theirs).abs().max())  # nan if one is


def line_of(processes: int, name: str, curve: Curve, reference: Curve, tolerance: float) -> tuple[list[str], bool]:
    """A row of the table, and whether it agrees."""
    loss, norm = difference(curve.losses, reference.losses), difference(curve.norms, reference.norms)
    good = loss <= tolerance and norm <= tolerance  # false for nan
    shown = " ".join(f"{x:.5f}" for x in curve.losses), " ".join(f"{x:.4f}" for x in curve.norms)
    return [str(processes), name, *shown, f"{loss:.1e}", f"{norm:.1e}", "same" if good else "DIFFERS"], good


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", type=int, nargs="+", choices=(*WORLDS, 8), help="default: all that there is room for"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=TOLERANCE, default="32-true")
    parser.add_argument("--tolerance", type=float, help="relative; default: 2e-5 in fp32, 3e-2 in bf16")
    arguments = parser.parse_args(words)
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else max(WORLDS)
    if gpus < max(arguments.worlds or [1]):
        parser.error(f"--device cuda: there are {gpus} GPUs here, and --worlds asks for {max(arguments.worlds or [1])}")
    arguments.worlds = arguments.worlds or [world for world in (*WORLDS, 8) if world <= gpus]
    arguments.tolerance = arguments.tolerance or TOLERANCE[arguments.precision]
    return arguments


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    given, began = (arguments.device, arguments.precision), time.perf_counter()
    reference = run_world(stock, 1, *given)[0]
    lines, good = [line_of(1, "stock Lightning", reference, reference, arguments.tolerance)[0]], True
    for world in arguments.worlds:
        shapes = list(meshes(world))
        curves = run_world(on_meshes, world, shapes, *given, timeout=300)[0]
        for shape, curve in zip(shapes, curves, strict=True):
            line, agrees = line_of(world, str(shape), curve, reference, arguments.tolerance)
            lines.append(line)
            good &= agrees
    heads = ("processes", "mesh", "losses", "gradient norms", "loss differs by", "norm differs by", "")
    print("\n".join(table(heads, lines, right={"processes", "loss differs by", "norm differs by"})))
    print(f"{arguments.device}, {arguments.precision}, torch {torch.__version__}; {time.perf_counter() - began:.0f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
