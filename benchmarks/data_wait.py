"""Whether the loader feeds a small, fast model on raw text: the share of a step that waits for data, from the suite's own log.

    python benchmarks/data_wait.py                              # one GPU, 16 cores; about two minutes
    python benchmarks/data_wait.py --device cpu --tiny          # does it run?

A Llama of 33 million parameters (vocabulary 8,192, rows of 2,048 tokens) through the real `Trainer`, `FSDPCompileStrategy` in
bf16 with `TritonKernels`, and `RescalableDataModule` on the standard library's source text, tokenized while the run goes on by a
BPE that is trained at the start. Small models are hard on a loader: they use up most tokens a second.

`step_seconds`, `tokens_per_second` (`Throughput`) and `data_wait_seconds` (`Straggler`: from the end of a batch to the start of
the next on the host, Lightning's own work and the copy to the device included) are what a run logs; the first interval, in which
it compiles and the workers start, is left out. `in the loader` is the part of it in which the host really waited for a batch to be
made or put together. On a GPU the host runs ahead, so a wait delays the device only where it is longer than that.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from workload import CLIP_NORM, ONLY_TRAIN, Shape, adamw, loader_arguments, settle, tokenizer_for, warm_up

from lightning_fms.callbacks.straggler import Straggler
from lightning_fms.callbacks.throughput import Throughput
from lightning_fms.data import RescalableDataModule
from lightning_fms.data.feed import Feed
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM

SMALL = functools.partial(Shape, 512, 8, 8, 4, 1536, 8192, 2048)
TINY = functools.partial(Shape, 64, 2, 4, 2, 128, 512, 128)
GOAL = 0.01
LOGGED = ("step_seconds", "tokens_per_second", "data_wait_seconds")


class Kept(DummyLogger):
    """Keeps what a run logs, by name and step."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, dict[int, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        for name, value in metrics.items():
            self.values.setdefault(name, {})[step or 0] = float(value)

    def after(self, first: int) -> dict[str, float]:
        """Return the mean over what was logged behind the first interval."""
        found = {name: [value for step, value in self.values[name].items() if step > first] for name in LOGGED}
        return {name: statistics.mean(values) for name, values in found.items()}


class InLoader(L.Callback):
    """Adds up the time that the host spends in the loader from a step on."""

    def __init__(self, first: int) -> None:
        self.first, self.seconds, self.steps = first, 0.0, 0
        self._load = Feed._load

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        def timed(feed: Feed) -> Any:
            began = time.perf_counter()
            found = self._load(feed)
            if trainer.global_step > self.first:
                self.seconds, self.steps = self.seconds + time.perf_counter() - began, self.steps + 1
            return found

        Feed._load = timed  # type: ignore[method-assign]


def train(shape: Shape, tokenizer: str, workers: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Train with so many workers and return what the log says."""
    L.seed_everything(0, verbose=False)
    settle(device)
    every = max(1, steps // 3)
    kept, in_loader, kernels = (
        Kept(),
        InLoader(every),
        TritonKernels(backend="auto" if device.type == "cuda" else "reference"),
    )
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        strategy=FSDPCompileStrategy(),
        precision="bf16-mixed",
        callbacks=[kernels, Throughput(), Straggler(every_n_steps=every), in_loader],
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=every,
        **{**ONLY_TRAIN, "logger": kept},
    )
    module = CausalLM(shape.model(), adamw, warm_up)
    data = RescalableDataModule(**loader_arguments(shape, tokenizer), num_workers=workers)
    trainer.fit(module, datamodule=data)
    found = kept.after(every)
    share = found["data_wait_seconds"] / found["step_seconds"]
    loading = in_loader.seconds / max(1, in_loader.steps) / found["step_seconds"]
    return {**found, "share": share, "in_loader": loading, "parameters": sum(p.numel() for p in module.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, which proves that this works")
    parser.add_argument("--steps", type=int, default=150, help="a third of them is not measured")
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < 6:
        parser.error(f"--steps {given.steps}: give at least 6, so that something is logged behind the first third")
    shape = (TINY if given.tiny else SMALL)(rows=4 if given.tiny else given.rows)
    if given.row is not None:
        row = train(shape, given.tokenizer, given.workers[0], given.steps, torch.device(given.device))
        given.row.write_text(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(tokenizer_for(shape, Path(folder)))
        for workers in given.workers:  # a process each: a run leaves its process group and its compiled code behind
            file = Path(folder, f"{workers}.json")
            own = ["--workers", str(workers), "--tokenizer", tokenizer, "--row", str(file)]
            subprocess.run([sys.executable, *sys.argv, *own], check=True)
            print(_line(workers, json.loads(file.read_text())), flush=True)


def _line(workers: int, row: dict[str, Any]) -> str:
    verdict = "below" if row["share"] < GOAL else "NOT below"
    return (
        f"{workers} workers: {row['tokens_per_second']:,.0f} tokens/s, step {row['step_seconds'] * 1e3:.2f} ms, "
        f"data wait {row['data_wait_seconds'] * 1e3:.3f} ms = {row['share']:.2%} of the step, {verdict} {GOAL:.0%}; "
        f"in the loader {row['in_loader']:.2%}; {row['parameters'] / 1e6:.1f} M parameters"
    )


if __name__ == "__main__":
    main()
