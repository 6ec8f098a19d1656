"""What a checkpoint costs: how long a save holds training up, waiting and in the background, and how much memory many of them take.

    python benchmarks/checkpoint.py                         # 0.2 GB of weights on the CPU, one process
    torchrun --nproc-per-node=2 benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --device cuda --width 4096 --layers 36 --saves 4     # the size of an 8B model

A save holds weights and two moments in fp32. *Stall*: from the call until training can go on. *Written*: until it is committed.
Between the saves there are optimizer steps. The target is a stall of at most 5 % of the save that waits.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_fms.distributed import restore, state
from lightning_fms.distributed.background import BackgroundSaver


def build(width: int, layers: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device(device):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        )
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, device: str, pending: Any = None) -> None:
    model(torch.ones(4, width, device=device)).square().mean().backward()
    if pending is not None:
        pending.copied()
    optimizer.step()
    optimizer.zero_grad()


def as_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    states = [state.optimizer_state(model, optimizer)]
    return {"state_dict": state.module_state(model), "optimizer_states": states, "global_step": number}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def memory_gib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder")
    arguments = parser.parse_args()
    device = arguments.device
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = Path(
        os.environ.get("BENCH_FOLDER") or arguments.folder or Path(tempfile.gettempdir()) / "fms-checkpoint-benchmark"
    )
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(arguments.width, arguments.layers, device)
    step(model, optimizer, arguments.width, device)
    size = sum(p.numel() for p in model.parameters()) * 12 / 1e9
    waiting, stalls, written, memory = [], [], [], []
    for number in range(arguments.saves):
        synchronize(device)
        began = time.perf_counter()
        restore.save_folder(folder / "waiting", as_lightning(model, optimizer, number))
        waiting.append(time.perf_counter() - began)
        step(model, optimizer, arguments.width, device)
    if rank == 0:
        shutil.rmtree(folder / "waiting")
    saver = BackgroundSaver()
    pending = None
    for number in range(arguments.saves):
        if pending is not None:
            pending.result()
        synchronize(device)
        began = time.perf_counter()
        pending = saver.save(folder / "background", as_lightning(model, optimizer, number))
        stalls.append(time.perf_counter() - began)
        step(model, optimizer, arguments.width, device, pending)
        pending.result()
        written.append(time.perf_counter() - began)
        memory.append(memory_gib())
    saver.close()
    if rank == 0:
        wait, stall = statistics.median(waiting), statistics.median(stalls[1:] or stalls)
        found = {
            "gigabytes": round(size, 3), "ranks": dist.get_world_size() if dist.is_initialized() else 1, "saves": arguments.saves,
            "waiting_s": round(wait, 3), "stall_s": round(stall, 4), "first_stall_s": round(stalls[0], 4),
            "stall_share": round(stall / wait, 4), "written_s": round(statistics.median(written), 3),
            "memory_gib_after_second": round(memory[min(1, len(memory) - 1)], 3), "memory_gib_at_end": round(memory[-1], 3),
        }  # fmt: skip
        print(json.dumps(found))
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
