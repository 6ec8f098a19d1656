"""The whole suite on all GPUs of a machine: speed, meshes, communication, checkpoints, runs that are killed and go on with fewer.

    python benchmarks/multi_gpu.py                                            # all parts, on all GPUs
    python benchmarks/multi_gpu.py --parts speed resume --out multi_gpu.json
    python benchmarks/multi_gpu.py --device cpu --devices 2 --shape tiny --steps 4 --warmup 1      # does it run?

Each part is a script that can be run alone, and what it prints is printed; the table at the end says how each part went.

    speed       tokens/s and memory of a GPU, ours and plain PyTorch's in one call, and of one GPU alone       gpu.py
    parity      losses and gradient norms of every mesh beside one process                                  parity.py
    overlap     the share of communication that is not hidden behind compute                               overlap.py
    checkpoint  how long a save holds up training                                                       checkpoint.py
    resume      N processes, killed; N/2, killed; N again: the same losses and documents as without      in this file

Leave NVLink multicast as the environment sets it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from workload import SHAPES

HERE = Path(__file__).parent
PARTS = ("speed", "parity", "overlap", "checkpoint", "resume")
VARIANTS = [
    "bf16",
    "bf16+kernels",
    "bf16+kernels+hsdp",
    "bf16+kernels+tensor",
    "bf16+kernels+fp8+small+gather",
    "bf16+kernels+fused",
    "peer:compile+fsdp+stream+cudnn",
    "peer:compile+fsdp+stream+cudnn+fp8+gather",
]
LAST_STEP, SAVE_EVERY = 45, 5
KILLED_AFTER = (20, 40)  # steps
AUDITED = (3, 17, 28, 41)  # steps, on each side of the kills
LOSS_TOLERANCE = 1e-3  # relative; sums of gradients are added in another order on another number of ranks


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    print("\n$ " + " ".join(command), flush=True)
    return subprocess.run(command, text=True, **options)


def script(name: str, *words: object) -> list[str]:
    return [sys.executable, str(HERE / name), *map(str, words)]


def speed(arguments: argparse.Namespace, work: Path) -> str:
    """All variants on all devices, and one of ours on one."""
    found = {}
    common = ["--shape", arguments.shape, "--steps", arguments.steps, "--warmup", arguments.warmup]
    common += ["--device", arguments.device, "--budget", arguments.budget]
    variants = [v for v in VARIANTS if arguments.devices % 2 == 0 or not {"hsdp", "tensor"} & set(v.split("+"))]
    if arguments.device == "cpu":
        variants = ["bf16", "bf16+hsdp", "fused", "peer:fsdp"]
    for devices, chosen in (
        (arguments.devices, variants),
        (1, variants[1:2] if arguments.device == "cuda" else ["bf16"]),
    ):
        out = work / f"speed-{devices}.json"
        run(script("gpu.py", *common, "--devices", devices, "--out", out, "--variants", *chosen))
        found[devices] = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    rows = {name: row["tokens_per_second"] for name, row in found[arguments.devices].items() if "error" not in row}
    failed = [name for name, row in found[arguments.devices].items() if "error" in row]
    (alone,) = found[1].items()
    lines = [f"{name} {rate:,.0f}" for name, rate in rows.items()]
    if "error" not in alone[1] and alone[0] in rows:
        lines.append(
            f"weak scaling of {alone[0]} 1 -> {arguments.devices}: {rows[alone[0]] / alone[1]['tokens_per_second']:.1%}"
        )
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; " + "; ".join(lines))
    return "tokens/s a device: " + "; ".join(lines)


def parity(arguments: argparse.Namespace, work: Path) -> str:
    """`parity.py` at this number of processes."""
    words = ["--device", arguments.device, "--worlds", arguments.devices]
    run(script("parity.py", *words), check=True)
    return "losses and gradient norms within its tolerance"


def overlap(arguments: argparse.Namespace, work: Path) -> str:
    """`overlap.py` with the shape."""
    variants = ["fsdp", "prefetch-2", "kept"]
    words = ["--device", arguments.device, "--devices", arguments.devices, "--shape", arguments.shape]
    run(script("overlap.py", *words, "--variants", *variants), check=True)
    return "see its table"


def checkpoint(arguments: argparse.Namespace, work: Path) -> str:
    """`checkpoint.py` on all ranks, at the size of an 8B model on GPUs."""
    large = ["--width", "4096", "--layers", "36", "--saves", "4"] if arguments.device == "cuda" else ["--width", "256"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.devices}"]
    run([sys.executable, *torchrun, str(HERE / "checkpoint.py"), "--device", arguments.device, *large], check=True)
    return "see its table"


def resume(arguments: argparse.Namespace, work: Path) -> str:
    """Kill runs in the middle of a step, go on with another number of processes, and compare with a run in one piece."""
    half = max(arguments.devices // 2, 1)
    pieces = work / "pieces"
    for devices, until, first in (
        (arguments.devices, KILLED_AFTER[0], True),
        (half, KILLED_AFTER[1], False),
        (arguments.devices, LAST_STEP, False),
    ):
        process = train(arguments, pieces, devices, first)
        if until < LAST_STEP:
            wait_for(pieces / f"rescaled/001/checkpoints/step-{until}.ckpt", process)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        elif process.wait():
            raise RuntimeError(f"the run on {devices} devices ended with {process.returncode}")
    whole = work / "whole"
    if train(arguments, whole, arguments.devices, True).wait():
        raise RuntimeError("the run in one piece failed")
    differing = [step for step in AUDITED if documents(pieces, step) != documents(whole, step)]
    if differing:
        raise RuntimeError(f"other documents in steps {differing}")
    ours, theirs = losses(pieces), losses(whole)
    shared = sorted(set(ours) & set(theirs))  # a killed process takes with it what its logger had not written yet
    after_all = LAST_STEP - KILLED_AFTER[-1]
    if (
        len(theirs) != LAST_STEP
        or len(shared) < LAST_STEP // 2
        or len([s for s in shared if s >= KILLED_AFTER[-1]]) != after_all
    ):
        raise RuntimeError(f"{len(ours)} and {len(theirs)} logged losses, {len(shared)} of the same steps")
    apart = max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in shared)
    if apart > LOSS_TOLERANCE:
        raise RuntimeError(f"losses up to {apart:.2e} apart (relative)")
    return f"{arguments.devices} -> {half} -> {arguments.devices}: documents equal, {len(shared)} losses within {apart:.1e}"


def train(arguments: argparse.Namespace, root: Path, devices: int, first: bool) -> subprocess.Popen[bytes]:
    """Start a run of the quickstart, or go on with it, in a process group of its own."""
    words = ["experiment=quickstart", "name=rescaled", f"paths.root={root}", f"trainer.devices={devices}"]
    words += [f"trainer.accelerator={'gpu' if arguments.device == 'cuda' else 'cpu'}", "data.global_batch_size=16"]
    words += [
        f"trainer.max_steps={LAST_STEP}",
        f"callbacks.checkpoint.every_n_steps={SAVE_EVERY}",
        "callbacks.sample=null",
    ]
    words += ["callbacks.data_trail.every_n_steps=5", "trainer.log_every_n_steps=1", "data.val_every_n_steps=1000"]
    command = [sys.executable, "-m", "lightning_fms.train", *words, *([] if first else ["resume=auto"])]
    print("\n$ " + " ".join(command), flush=True)
    return subprocess.Popen(command, start_new_session=True)


def wait_for(path: Path, process: subprocess.Popen[bytes], timeout_s: float = 300) -> None:
    began = time.monotonic()
    while not path.exists():
        if process.poll() is not None or time.monotonic() - began > timeout_s:
            raise RuntimeError(f"{path.name} did not come; exit code {process.poll()}")
        time.sleep(0.05)


def documents(root: Path, step: int) -> str:
    """What `fms-data audit` says of a step."""
    folder = str(root / "rescaled" / "001")
    command = [sys.executable, "-m", "lightning_fms.commands.data", "audit", folder, "--step", str(step), "--jsonl"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def losses(root: Path) -> dict[int, float]:
    """The logged loss of each step; of steps that were made twice the last."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 (slow)

    found: dict[int, tuple[float, float]] = {}
    for file in root.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        if "loss" in events.Tags()["scalars"]:
            for event in events.Scalars("loss"):
                found[event.step] = max(found.get(event.step, (0.0, 0.0)), (event.wall_time, event.value))
    return {step: value for step, (_, value) in found.items()}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, help="default: all GPUs")
    parser.add_argument("--shape", choices=SHAPES, help="default: Llama-8B with 2 rows, 16 layers on fewer than 8 GPUs")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--budget", type=float, default=1500, help="seconds for the part `speed`")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    arguments = parser.parse_args(words)
    if arguments.devices is None:
        arguments.devices = torch.cuda.device_count()
    if arguments.devices < 2:
        parser.error(f"--devices {arguments.devices}: needs at least 2")
    arguments.shape = arguments.shape or ("8b" if arguments.devices >= 8 else "8b16r2")
    parts: dict[str, Callable[[argparse.Namespace, Path], str]] = {
        part.__name__: part for part in (speed, parity, overlap, checkpoint, resume)
    }
    table, work = {}, Path(tempfile.mkdtemp())
    for name in arguments.parts:
        try:
            table[name] = ("ok", parts[name](arguments, work))
        except Exception as error:
            table[name] = ("FAILED", str(error))
    shutil.rmtree(work)
    print(
        f"\n{arguments.devices} x {torch.cuda.get_device_name() if arguments.device == 'cuda' else 'CPU'}, {arguments.shape}"
    )
    for name, (verdict, detail) in table.items():
        print(f"{name:11} {verdict:7} {detail}")
    if arguments.out:
        arguments.out.write_text(json.dumps(table, indent=1))
    return int(any(verdict != "ok" for verdict, _ in table.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
