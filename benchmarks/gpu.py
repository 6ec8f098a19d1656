"""What each plugin brings on one GPU: the same run through the real Trainer, with one plugin after the other.

    python benchmarks/gpu.py --out results.json                                  # both shapes, four variants
    python benchmarks/gpu.py --shape 8b16 --variants bf16+cudnn kernels+fp8+cudnn --profile
    python benchmarks/gpu.py --peer peers.py -- all 8b16 8192 1 compile fsdp+compile     # a peer's rows, same machine
    python benchmarks/gpu.py --shape tiny --device cpu --steps 6 --warmup 2      # does it run at all?

A variant is `bf16` (the strategy alone) plus options joined by `+`: `kernels` (TritonKernels), `fp8` (tensorwise),
`rowwise`, `rowwise_gw_hp` (FP8 with that recipe), `small` (FP8 also where layers are small), `cudnn` (attention by cuDNN).

Each runs in a process of its own: a plain CausalLM on `FSDPCompileStrategy`, streaming the standard library's text (prose
and code, 1:3) with a BPE tokenizer trained on it at the start, AdamW, gradients clipped at norm 1. A step is a whole
optimizer step, from the end of the last one, the device synchronised; the median after the warm-up counts. MFU is model
FLOPs (6 N + 12 L H E T a token, attention counted in full) over the dense bf16 peak of the device, also for FP8.
Loss is the mean of the last 10 steps: all variants see the same batches.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchao
import triton
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lightning_fms.callbacks.flops import count_train_flops
from lightning_fms.callbacks.peaks import peak_of
from lightning_fms.data import RescalableDataModule
from lightning_fms.data.sources import PythonSource
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM, Llama
from lightning_fms.precision import FP8Precision

VARIANTS = ["bf16", "bf16+kernels", "bf16+fp8", "bf16+kernels+fp8"]
RECIPES = {"fp8": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_gw_hp"}
OPTIONS = {"bf16", "kernels", "small", "cudnn", *RECIPES}
BPE_VOCABULARY = 8192


@dataclass(frozen=True)
class Shape:
    """A Llama shape and the batch it is measured at; the vocabulary is the model's, the tokenizer uses a part of it."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    rows: int

    def model(self) -> Llama:
        with torch.device("meta"):
            return Llama(self.vocab_size, self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.ffn_dim)


SHAPES = {
    "8b16": Shape(4096, 16, 32, 8, 14336, 128256, seq_len=8192, rows=1),
    "1b": Shape(2048, 16, 32, 8, 8192, 128256, seq_len=4096, rows=4),
    "tiny": Shape(256, 2, 4, 2, 512, 1024, seq_len=128, rows=4),
}


# ---- one variant, in its own process


class StepTimer(L.Callback):
    """Seconds and loss of every optimizer step, and if asked for, the kernels of one step after the measured ones."""

    def __init__(self, warmup: int, steps: int, profiled: bool) -> None:
        self.warmup, self.steps, self.profiled = warmup, steps, profiled
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.kernels: list[tuple[str, float, int]] = []
        self.peak_gib: float | None = None
        self.reserved_gib: float | None = None
        self._profiler: profile | None = None
        self._last = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        on_gpu = module.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._profiler is not None:
            self._profiler.stop()
            self.kernels = _slowest(self._profiler, on_gpu)
            return
        self.seconds.append(now - self._last)
        self.losses.append(float(outputs["loss"]))
        done = len(self.seconds)
        if on_gpu and done == self.warmup:
            torch.cuda.reset_peak_memory_stats()
        if on_gpu and done == self.steps:
            self.peak_gib = torch.cuda.max_memory_allocated() / 2**30
            self.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
        if self.profiled and done == self.steps:
            self._profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
            self._profiler.start()
        self._last = time.perf_counter()


def _slowest(profiler: profile, on_gpu: bool, most: int = 40) -> list[tuple[str, float, int]]:
    """Kernels (on a CPU: operators) of one step by time: name, milliseconds in all, calls."""
    events = [
        (e.key[:160], (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e3, e.count)
        for e in profiler.key_averages()
    ]
    return sorted(events, key=lambda event: -event[1])[:most]


def measure(shape_name: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and return its row."""
    shape, options, device = SHAPES[shape_name], set(variant.split("+")), torch.device(arguments.device)
    L.seed_everything(0, verbose=False)
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        torch.set_num_threads(1)
    module = CausalLM(shape.model(), functools.partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.95), fused=True))
    flops = count_train_flops(module.net).at(shape.seq_len)
    timer = StepTimer(arguments.warmup, arguments.steps, arguments.profile)
    kernels = TritonKernels(backend="auto" if device.type == "cuda" else "reference")
    fp8 = _fp8(options, device)
    strategy = FSDPCompileStrategy()
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=arguments.steps + arguments.profile,
        strategy=strategy,
        callbacks=[timer, *([kernels] if "kernels" in options else [])],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **({"plugins": [fp8]} if fp8 else {"precision": "bf16-mixed"}),
    )
    attention: AbstractContextManager = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if "cudnn" in options else nullcontext()
    with attention:
        trainer.fit(module, datamodule=data(shape, arguments))
    measured = timer.seconds[arguments.warmup :]
    tokens = shape.rows * shape.seq_len / statistics.median(measured)
    peak = peak_of(device)
    return {
        "shape": shape_name,
        "variant": variant,
        "tokens_per_second": tokens,
        "mfu": None if peak is None else tokens * flops / (peak * 1e12),
        "peak_gib": timer.peak_gib,
        "reserved_gib": timer.reserved_gib,
        "loss": statistics.mean(timer.losses[-10:]),
        "step_ms": statistics.median(measured) * 1e3,
        "fastest_ms": min(measured) * 1e3,
        "slowest_ms": max(measured) * 1e3,
        "first_step_s": timer.seconds[0],
        "steps": len(measured),
        "losses": timer.losses,
        "kernels_of_a_step": timer.kernels,
        "report": [
            *strategy.report.lines(),
            *(fp8.report if fp8 else []),
            *(kernels.report if "kernels" in options else []),
        ],
    }


def _fp8(options: set[str], device: torch.device) -> FP8Precision | None:
    recipes = [recipe for option, recipe in RECIPES.items() if option in options]
    if not recipes:
        return None
    on_cpu = device.type == "cpu"  # there it proves that the run works, on layers that are all too small to gain
    return FP8Precision(recipes[-1], emulate=on_cpu, keep_small=not (on_cpu or "small" in options))


def data(shape: Shape, arguments: argparse.Namespace) -> RescalableDataModule:
    return RescalableDataModule(
        sources={"prose": PythonSource("docstrings"), "code": PythonSource("code")},
        mixture={"prose": 1, "code": 3},
        tokenizer=arguments.tokenizer,
        seq_len=shape.seq_len,
        global_batch_size=shape.rows,
        num_workers=2 if arguments.device == "cuda" else 0,
    )


# ---- all variants


def train_tokenizer(path: Path, vocab_size: int) -> None:
    """A byte-level BPE on the text that the run trains on; a few seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(path))


def _corpus() -> Iterator[str]:
    for source in (PythonSource("docstrings"), PythonSource("code")):
        for file, size in enumerate(source.listing.sizes):
            try:
                window = source.window(file, 0, int(size))
                for start, length in zip(window.starts, window.refs, strict=True):
                    yield str(source.read(file, int(start), int(length)))
            except ValueError:  # a file that is no Python on purpose, in somebody's standard library
                continue


def run_variants(arguments: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """One process a variant, until the time is up; a variant that fails is a row with its error."""
    rows = []
    for shape in arguments.shape:
        tokenizer = Path(arguments.work) / f"bpe-{min(BPE_VOCABULARY, SHAPES[shape].vocab_size)}.json"
        if not tokenizer.exists():
            train_tokenizer(tokenizer, min(BPE_VOCABULARY, SHAPES[shape].vocab_size))
        for variant in arguments.variants:
            row = _in_process(shape, variant, tokenizer, arguments, deadline - time.monotonic())
            print(line_of(row), flush=True)
            rows.append(row)
    return rows


def _in_process(
    shape: str, variant: str, tokenizer: Path, arguments: argparse.Namespace, seconds_left: float
) -> dict[str, Any]:
    name = {"shape": shape, "variant": variant}
    if seconds_left < arguments.least:
        return {**name, "error": f"not run: {max(seconds_left, 0):.0f} s left of --budget {arguments.budget}"}
    result = Path(arguments.work) / "row.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", shape, variant, "--tokenizer", str(tokenizer), "--row", str(result)]
    command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup), "--device", arguments.device]
    command += ["--profile"] if arguments.profile else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_left)
    except subprocess.TimeoutExpired:
        return {**name, "error": f"stopped: --budget {arguments.budget} s is used up"}
    if result.exists():
        return json.loads(result.read_text())
    return {**name, "error": "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])}


def run_peer(arguments: argparse.Namespace, seconds_left: float) -> list[str]:
    """The lines of a peer's own benchmark."""
    if seconds_left < arguments.least:
        return [f"not run: {max(seconds_left, 0):.0f} s left of --budget {arguments.budget}"]
    command = [sys.executable, arguments.peer, *arguments.peer_arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=seconds_left)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nstopped: --budget {arguments.budget} s is used up"
    return output.strip().splitlines()


def line_of(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['shape']:5} {row['variant']:28}"
    if "error" in row:
        return f"{head} {row['error']}"
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    return (
        f"{head} {row['tokens_per_second']:>9,.0f} {mfu:>7} {peak:>9} {row['loss']:>8.3f} {row['step_ms']:>9.1f}"
        f"  [{row['fastest_ms']:.1f}, {row['slowest_ms']:.1f}]  {row['first_step_s']:.1f}"
    )


HEADER = (
    f"{'shape':5} {'variant':28} {'tokens/s':>9} {'MFU':>7} {'peak GiB':>9} {'loss':>8} {'step ms':>9}"
    "  [min, max]  first step s"
)


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "lightning": L.__version__,
        "torchao": torchao.__version__,
        "cpus": os.cpu_count(),
    }


def parse(words: Sequence[str]) -> argparse.Namespace:
    words, peer_words = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b16", "1b"])
    parser.add_argument("--variants", nargs="*", default=VARIANTS)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps, warm-up included")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that do not count")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--least", type=float, default=30, help="seconds without which nothing is started")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one more step")
    parser.add_argument("--out", type=Path, help="JSON file for rows, peer's lines and environment")
    parser.add_argument("--peer", help="a script to run in the same call, with the words after `--`")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    arguments.peer_arguments = list(peer_words)
    for variant in arguments.variants:
        if unknown := set(variant.split("+")) - OPTIONS:
            parser.error(f"variant {variant!r}: {', '.join(sorted(unknown))} is none of {', '.join(sorted(OPTIONS))}")
    if not 0 <= arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} leaves nothing of --steps {arguments.steps}")
    return arguments


def main(words: Sequence[str]) -> int:
    deadline = time.monotonic()
    arguments = parse(words)
    deadline += arguments.budget
    if arguments.one:
        arguments.row.write_text(json.dumps(measure(*arguments.one, arguments)))
        return 0
    print(" ".join(f"{key} {value}" for key, value in environment(arguments.device).items()))
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as arguments.work:
        rows = run_variants(arguments, deadline)
    peer = run_peer(arguments, deadline - time.monotonic()) if arguments.peer else []
    print("\n".join(peer), flush=True)
    for row in rows:
        for name, ms, calls in row.get("kernels_of_a_step", [])[:25]:
            print(f"{row['shape']} {row['variant']}  {ms:8.2f} ms {calls:5}x  {name}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"environment": environment(arguments.device), "rows": rows, "peer": peer}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
