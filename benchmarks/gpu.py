"""What each plugin brings, beside a hand-written loop: one table, one process (or `--devices` of them) a row.

    python benchmarks/gpu.py --out results.json                                  # both shapes, ours and the peer's
    python benchmarks/gpu.py --shape 8b16 --variants peer:compile+cudnn kernels+fp8+cudnn --profile
    python benchmarks/gpu.py --shape tiny --device cpu --steps 6 --warmup 2 --variants bf16 peer:plain   # does it run?

A variant is options joined by `+`, or `peer:` and the peer's options:

    {options}

    {peer_options}

Ours (`trainer_run.py`) is a plain CausalLM on `FSDPCompileStrategy` in the real Trainer; the peer (`peer_loop.py`) is a loop
without Lightning. Both have the same initial weights, batches, AdamW, warm-up of the rate and clipping at norm 1, so the
losses compare. The text is the standard library's (prose and code, 1:3), with a BPE tokenizer trained on it at the start. Ours
reads and tokenizes while it trains; the peer finds all batches on the device.

A step is a whole optimizer step, from the end of the last one, the device synchronised; the median after the warm-up counts.
Peak memory is that of the steps after the warm-up. MFU is model FLOPs (6 N + 12 L H E T a token, attention counted in full)
over the dense bf16 peak of the device, also for FP8. Loss is the mean of the last 10 steps. All variants share one folder
of compiled code, so a later one's first step may find what an earlier one compiled; TORCHINDUCTOR_CACHE_DIR keeps it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from step_meter import explanation
from workload import OPTIONS, PEER_OPTIONS, SHAPES, add_length, tokenizer_for

VARIANTS = [
    "peer:compile+cudnn",
    "bf16+cudnn",
    "bf16+kernels+cudnn",
    "peer:compile+cudnn+fp8",
    "bf16+fp8+small+cudnn",
    "bf16+kernels+fp8+small+cudnn",
]
PEER = "peer:"
HERE = Path(__file__).parent
PACKAGES = ("torch", "triton", "lightning", "torchao")
HEADER = (
    f"{'shape':5} {'variant':32} {'tokens/s':>9} {'MFU':>7} {'peak GiB':>9} {'loss':>8} {'step ms':>9}"
    "  [min, max]  first step s"
)


def run_variants(arguments: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """One process a variant, until the time is up; a variant that fails is a row with its error."""
    rows = []
    for shape in arguments.shape:
        tokenizer = tokenizer_for(SHAPES[shape], arguments.work)
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
    result = arguments.work / "row.json"
    result.unlink(missing_ok=True)
    script = "peer_loop.py" if variant.startswith(PEER) else "trainer_run.py"
    command = [sys.executable]
    if variant.startswith(PEER) and arguments.devices > 1:  # ours starts its processes itself
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.devices}"]
    command += [str(HERE / script), shape, variant.removeprefix(PEER), "--devices", str(arguments.devices)]
    command += ["--tokenizer", str(tokenizer), "--row", str(result), "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    command += ["--profile"] if arguments.profile else []
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(arguments.work / "inductor"), **os.environ}
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_left, env=environment)
    except subprocess.TimeoutExpired:
        return {**name, "error": f"stopped: --budget {arguments.budget} s is used up"}
    if done.returncode == 0:
        return {**name, "process_s": time.monotonic() - began, **json.loads(result.read_text())}
    return {**name, "error": "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])}


def line_of(row: dict[str, Any]) -> str:
    """One row of the table."""
    head = f"{row['shape']:5} {row['variant']:32}"
    if "error" in row:
        return f"{head} {row['error']}"
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    return (
        f"{head} {row['tokens_per_second']:>9,.0f} {mfu:>7} {peak:>9} {row['loss']:>8.3f} {row['step_ms']:>9.1f}"
        f"  [{row['fastest_ms']:.1f}, {row['slowest_ms']:.1f}]  {row['first_step_s']:.1f}"
    )


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cpus": os.cpu_count(),
    }


def described() -> str:
    """The docstring with the tables of options."""
    tables = (
        "\n    ".join(f"{name:14} {meaning}" for name, meaning in options.items())
        for options in (OPTIONS, {f"{PEER}{name}": meaning for name, meaning in PEER_OPTIONS.items()})
    )
    return (__doc__ or "").format(options=next(tables), peer_options=next(tables))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=described(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["8b16", "1b"])
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    add_length(parser)
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--least", type=float, default=30, help="seconds without which nothing is started")
    parser.add_argument("--out", type=Path, help="JSON file for rows and environment")
    arguments = parser.parse_args(words)
    for variant in arguments.variants:
        peer = variant.startswith(PEER)
        known, given = PEER_OPTIONS if peer else OPTIONS, set(variant.removeprefix(PEER).split("+"))
        if unknown := given - known.keys():
            parser.error(f"variant {variant!r}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
        if peer and {"lce", "fsdp"} <= given:
            parser.error(f"variant {variant!r}: Liger's loss needs the head's whole weight, which fsdp shards")
        if peer and arguments.devices > 1 and "fsdp" not in given:
            parser.error(f"variant {variant!r}: --devices {arguments.devices} needs fsdp")
    if not 0 <= arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} leaves nothing of --steps {arguments.steps}")
    return arguments


def main(words: Sequence[str]) -> int:
    deadline = time.monotonic()
    arguments = parse(words)
    deadline += arguments.budget
    print(" ".join(f"{key} {value}" for key, value in environment(arguments.device).items()))
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as work:
        arguments.work = Path(work)
        rows = run_variants(arguments, deadline)
    for row in rows:
        if row.get("explained"):
            print("\n" + "\n".join(explanation(f"{row['shape']} {row['variant']}", row)))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"environment": environment(arguments.device), "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
