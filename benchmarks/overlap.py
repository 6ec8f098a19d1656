"""How much of the communication is not hidden behind compute, for some ways to shard: one table, one world a row.

    python benchmarks/overlap.py                                        # all GPUs of this machine, 1B shape
    python benchmarks/overlap.py --devices 8 --shape 8b16 --variants fsdp prefetch-2 hsdp
    python benchmarks/overlap.py --device cpu --devices 2 --shape tiny  # runs, and says why nothing is measured

A profiler looks at three steps after the warm-up, on every rank (`callbacks.Overlap`); numbers are means over the ranks. Exposed is
the time in which a collective's kernel runs and nothing else does; a collective that waits for a late rank counts. Steps are
those before the profiler.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # imports that look for GPUs must not start CUDA: ranks are forked

import torch
from synthetic_run import train
from workload import SHAPES

from lightning_fms.callbacks import Overlap
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.tables import table

sys.path.append(str(Path(__file__).parents[1]))
from tests.worlds import run_world

VARIANTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "prefetch-2": {"prefetch": 2},
    "prefetch-3": {"prefetch": 3},
    "kept": {"reshard_after_forward": False},
    "hsdp": {"replicate": 2},
    "tensor": {"tensor": 2},
    "full": {"activation_checkpointing": "full"},
}
WARMUP, STEPS, PROFILED = 8, 14, 3


def rank(kwargs: dict[str, Any], arguments: argparse.Namespace) -> tuple[float, tuple[float, ...] | None]:
    """Milliseconds of a step, and per step (communication, exposed, total) in milliseconds, or None where none is seen."""
    overlap = Overlap(at_step=STEPS, steps=PROFILED)
    strategy = FSDPCompileStrategy(**kwargs)
    reader = int(os.environ["RANK"]) // kwargs.get("tensor", 1)
    meter = train(
        SHAPES[arguments.shape],
        strategy,
        arguments.device,
        arguments.devices,
        STEPS + PROFILED,
        WARMUP,
        reader,
        [overlap],
    )
    measured = sorted(meter.seconds[WARMUP:STEPS])
    found = overlap.found
    seen = tuple(x / PROFILED / 1e3 for x in astuple(found)) if found is not None else None
    return measured[len(measured) // 2] * 1e3, seen


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, help="default: all GPUs")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["fsdp", "prefetch-2", "kept", "full"])
    arguments = parser.parse_args(words)
    arguments.devices = arguments.devices or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    return arguments


def why_nothing(arguments: argparse.Namespace) -> str | None:
    """Why no exposed communication can be measured here; None where it can."""
    if arguments.device == "cpu":
        return "gloo's collectives are no kernels that a profiler sees beside others"
    if arguments.devices < 2:
        return f"--devices {arguments.devices}: one GPU communicates with none"
    return None


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if why := why_nothing(arguments):
        print(f"nothing is measured: {why}; it takes two GPUs and NCCL")
        if arguments.device == "cuda":
            return 0
    heads = ("variant", "ms per step", "communication ms", "exposed ms", "share exposed", "of step")
    lines = []
    for name in arguments.variants:
        ms, found = run_world(rank, arguments.devices, VARIANTS[name], arguments, timeout=400)[0]
        shown = ["-"] * 4
        if found is not None:
            communication, exposed, total = found
            share = exposed / communication if communication else 0.0
            shown = [f"{communication:.1f}", f"{exposed:.1f}", f"{share:.1%}", f"{exposed / total:.1%}"]
        lines.append([name, f"{ms:.1f}", *shown])
    print(f"{arguments.devices} x {arguments.device}, {arguments.shape}, torch {torch.__version__}")
    print("\n".join(table(heads, lines, right=set(heads[1:]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
