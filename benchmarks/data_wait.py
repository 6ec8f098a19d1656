"""Whether the loader feeds a small, fast model on raw text: the share of a step that waits for data, from the suite's own log.

    python benchmarks/data_wait.py                              # one GPU, 16 cores; about two minutes
    python benchmarks/data_wait.py --device cpu --tiny          # does it run?

A Llama of 33 million parameters (vocabulary 8,192, rows of 2,048 tokens) through the real `Trainer`, `FSDPCompileStrategy` in
bf16 with `TritonKernels`, and `RescalableDataModule` on the standard library's source text in one jsonl file, tokenized while the
run goes on by a BPE that is trained at the start. Small models are hard on a loader: they use up most tokens a second.

`step_seconds`, `tokens_per_second` (`Throughput`) and `data_wait_seconds` (`Straggler`: what the host spends fetching a batch) are
what a run logs; the first interval, in which it compiles and the workers start, is left out. On a GPU the host runs ahead, so a
fetch delays the device only where it takes longer than that. What it costs in the end is seen beside `ready`: the same model on
one batch that lies in pinned memory.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader
from workload import CLIP_NORM, ONLY_TRAIN, Shape, adamw, loader_arguments, settle, tokenizer_for, warm_up

from lightning_fms.callbacks.straggler import Straggler
from lightning_fms.callbacks.throughput import Throughput
from lightning_fms.data import RescalableDataModule, StreamLoader
from lightning_fms.data.sources import PythonSource
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM

SMALL = functools.partial(Shape, 512, 8, 8, 4, 1536, 8192, 2048)
TINY = functools.partial(Shape, 64, 2, 4, 2, 128, 512, 128)
GOAL = 0.01
TEXT = "code.jsonl"
READY = "ready"  # instead of a number of workers: no loader
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
        """Return the mean over what was logged behind the first interval, of which `Straggler` tells a step later."""
        found = {name: [value for step, value in self.values[name].items() if step > first + 1] for name in LOGGED}
        return {name: statistics.mean(values) for name, values in found.items()}


def write_text(folder: Path) -> None:
    """Write the standard library as jsonl: read from its own files, each worker would have to parse them."""
    source = PythonSource("code")
    with (folder / TEXT).open("w") as file:
        for number, size in enumerate(source.listing.sizes):
            try:
                for start in source.window(number, 0, int(size)).starts:
                    file.write(json.dumps({"text": source.read(number, int(start), 0)}) + "\n")
            except ValueError:  # a file in an encoding of its own
                continue


def source_of(shape: Shape, tokenizer: str, workers: int | None, steps: int) -> Any:
    """Return what `Trainer.fit` trains on: the data module, or one batch of it again and again."""
    text = {"code": Path(tokenizer).with_name(TEXT)}
    arguments = {**loader_arguments(shape, tokenizer), "sources": text, "mixture": None}
    if workers is not None:
        return RescalableDataModule(**arguments, num_workers=workers)
    batch = next(iter(StreamLoader(**arguments)))
    if torch.cuda.is_available():
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return DataLoader([batch] * steps, batch_size=None)


def train(shape: Shape, tokenizer: str, workers: int | None, steps: int, device: torch.device) -> dict[str, Any]:
    """Train with so many workers, or without a loader, and return what the log says."""
    L.seed_everything(0, verbose=False)
    settle(device)
    every = max(1, steps // 3)
    kept, kernels = Kept(), TritonKernels(backend="auto" if device.type == "cuda" else "reference")
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        strategy=FSDPCompileStrategy(),
        precision="bf16-mixed",
        callbacks=[kernels, Throughput(), Straggler(every_n_steps=every)],
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=every,
        **{**ONLY_TRAIN, "logger": kept},
    )
    module = CausalLM(shape.model(), adamw, warm_up)
    trainer.fit(module, source_of(shape, tokenizer, workers, steps))
    found = kept.after(every)
    share = found["data_wait_seconds"] / found["step_seconds"]
    return {**found, "share": share, "parameters": sum(p.numel() for p in module.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, which proves that this works")
    parser.add_argument("--steps", type=int, default=300, help="a third of them is not measured")
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--workers", nargs="+", default=[READY, "2", "4", "8"], help="numbers, or 'ready': no loader")
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < 6:
        parser.error(f"--steps {given.steps}: give at least 6, so that something is logged behind the first third")
    shape = (TINY if given.tiny else SMALL)(rows=4 if given.tiny else given.rows)
    if given.row is not None:
        workers = None if given.workers[0] == READY else int(given.workers[0])
        row = train(shape, given.tokenizer, workers, given.steps, torch.device(given.device))
        given.row.write_text(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = str(tokenizer_for(shape, Path(folder)))
        write_text(Path(folder))
        ready = None
        for workers in given.workers:  # a process each: a run leaves its process group and compiled code behind
            file = Path(folder, f"{workers}.json")
            own = ["--workers", workers, "--tokenizer", tokenizer, "--row", str(file)]
            subprocess.run([sys.executable, *sys.argv, *own], check=True)
            row = json.loads(file.read_text())
            ready = row["step_seconds"] if workers == READY else ready
            print(_line(workers, row, ready), flush=True)


def _line(workers: str, row: dict[str, Any], ready: float | None) -> str:
    name = "ready" if workers == READY else f"{workers} workers"
    verdict = "below" if row["share"] < GOAL else "NOT below"
    beside = "" if ready is None else f" ({row['step_seconds'] / ready - 1:+.1%})"
    return (
        f"{name}: {row['tokens_per_second']:,.0f} tokens/s, step {row['step_seconds'] * 1e3:.2f} ms{beside}, "
        f"data wait {row['data_wait_seconds'] * 1e3:.3f} ms = {row['share']:.2%} of "
        f"the step, {verdict} {GOAL:.0%}; {row['parameters'] / 1e6:.1f} M parameters"
    )


if __name__ == "__main__":
    main()
