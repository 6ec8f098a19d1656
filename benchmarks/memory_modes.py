"""What each way to save memory saves, and what it costs, on one GPU: one table, one process a row.

    python benchmarks/memory_modes.py                                          # 1B shape, 4 rows of 4,096 tokens
    python benchmarks/memory_modes.py --modes none full full+offload
    python benchmarks/memory_modes.py --device cpu --shape tiny                # does it run? (what a CPU can do)

A step is a whole optimizer step of `FSDPCompileStrategy` in bf16 with fused kernels, the device synchronised; the median after
the warm-up counts, and the peak is that of the steps after it. Tokens are random, and the same for each row, so the losses
compare. On one device parameters are sharded, and so resharded, only with cpu_offload. Processes are forked after the imports
and share compiled code, which keeps a row to some seconds.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # imports that look for GPUs must not start CUDA: ranks are forked

from synthetic_run import train
from workload import SHAPES

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.tables import table

SELECTIVE = {"activation_checkpointing": "selective"}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "every-2": {**SELECTIVE, "checkpoint_every": 2},
    "save-ops": {**SELECTIVE, "save_ops": "compute"},
    "budget-0.5": {"activation_checkpointing": "budget", "activation_budget": 0.5},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_offload": True},
    "full+offload": {"activation_checkpointing": "full", "activation_offload": True},
    "cpu-offload": {"cpu_offload": True},
    "cpu-offload+kept": {"cpu_offload": True, "reshard_after_forward": False},
}
ON_CPU = ("none", "every-2", "save-ops", "full")  # budget needs a compiler, offload another memory
LEAST_S = 12.0  # without which nothing is started


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    strategy = FSDPCompileStrategy(**MODES[mode])
    shape = SHAPES[arguments.shape]
    meter = train(shape, strategy, arguments.device, 1, arguments.steps, arguments.warmup)
    return meter.row(shape.rows * shape.seq_len, 0.0)


def in_process(mode: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One row in a process of its own; an error is a row, too."""
    if seconds < LEAST_S:
        return {"error": f"not run: {max(seconds, 0):.0f} s left of --budget {arguments.budget:g}"}
    context = multiprocessing.get_context("fork")  # nothing has touched the GPU here
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(send, mode, arguments))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(seconds) else {"error": f"stopped after {seconds:.0f} s"}
    except EOFError:
        process.join(5)
        return {"error": f"ended with code {process.exitcode} and no result (out of memory?)"}
    finally:
        process.kill()
        process.join()


def _run(send: Any, mode: str, arguments: argparse.Namespace) -> None:
    try:
        send.send(measure(mode, arguments))
    except BaseException as error:
        traceback.print_exc()
        send.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]})
    finally:
        send.close()
        os._exit(0)


def lines_of(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The table; shares are of the first row, if it was measured."""
    heads = ("mode", "peak GiB", "of first", "ms per step", "of first", "loss", "first step s", "")
    first = next(iter(rows.values()))
    lines = []
    for mode, row in rows.items():
        if "error" in row:
            lines.append([mode, *[""] * 6, row["error"]])
            continue
        peak, ms = row["peak_gib"], row["step_ms"]
        share = [f"{peak / first['peak_gib']:.2f}" if peak and first.get("peak_gib") else "-"]
        slower = f"{ms / first['step_ms']:.2f}" if "step_ms" in first else "-"
        shown = "-" if peak is None else f"{peak:.1f}"
        lines.append([mode, shown, *share, f"{ms:.1f}", slower, f"{row['loss']:.4f}", f"{row['first_step_s']:.1f}", ""])
    return table(heads, lines, right=set(heads[1:7]))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: all that the device can do")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4, help="first steps that do not count")
    parser.add_argument("--budget", type=float, default=200, help="seconds for everything")
    arguments = parser.parse_args(words)
    possible = list(MODES) if arguments.device == "cuda" else list(ON_CPU)
    arguments.modes = arguments.modes or possible
    if not 0 <= arguments.warmup < arguments.steps:
        parser.error(f"--warmup {arguments.warmup} leaves nothing of --steps {arguments.steps}")
    if wrong := set(arguments.modes) - set(possible):
        parser.error(f"--modes {' '.join(sorted(wrong))}: on {arguments.device} there are {', '.join(possible)}")
    return arguments


def main(words: Sequence[str]) -> int:
    arguments, began = parse(words), time.monotonic()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        for mode in arguments.modes:
            rows[mode] = in_process(mode, arguments, began + arguments.budget - time.monotonic())
            print(
                f"{mode}: {rows[mode].get('error', 'done')} ({time.monotonic() - began:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    shape = SHAPES[arguments.shape]
    print(
        f"{arguments.device}, {arguments.shape}: {shape.rows} rows of {shape.seq_len} tokens, {arguments.steps} steps"
    )
    print("\n".join(lines_of(rows)))
    return int(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
