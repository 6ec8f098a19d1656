"""Predicted against real peak memory of one rank, and how long predictions take.

    python benchmarks/plan_memory.py --real peaks.json         # on a machine with one GPU: run configurations, write their peaks
    python benchmarks/plan_memory.py --predict peaks.json      # anywhere: predict the same ones, and compare
    python benchmarks/plan_memory.py --documented              # the runs of docs/performance.md, by the whole Trainer
    python benchmarks/plan_memory.py --time                    # 24 configurations of Llama 1B on 4 ranks, seconds

One GPU is enough for N ranks: under a fake process group of N, rank 0 allocates exactly what it would among real ones;
collectives do nothing. Everything else is real: `planning.subject` places the model as the strategy does (kernels, FP8, compiled
blocks, sharding, the optimizer in one pass) and runs whole optimizer steps. The peak is that of the steps after the first
(`torch.cuda.max_memory_allocated`), so context and fragmentation are left out; `reserved` is what the allocator held.

All configurations run in one process, those that matter most first; the JSON is written after each, so that what ends at
`--budget` counts. A configuration that runs out of memory is a row. On a CPU (`--device cpu`, a tiny model) storages are counted
instead, without a compiler: that only shows that it runs, because eager attention takes another way on fake tensors there.
"""

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_fms import app
from lightning_fms.planner.memory import GIB, Outside, Verdict
from lightning_fms.planner.probe import run_step
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration, enumerate_space
from lightning_fms.planner.tracker import MemoryTracker
from lightning_fms.planning.jobs import Probed, prediction, probe, structure_of
from lightning_fms.planning.scope import job_for
from lightning_fms.planning.subject import Structure, assemble, process_group

PRECISIONS = ("bf16", "fp8", "fused")


@dataclass(frozen=True)
class Shape:
    """A model and the tokens of its rows."""

    model: str
    net: dict[str, int]
    vocab_size: int
    seq_len: int


LLAMA_8B = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}
LLAMA_1B = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192}
SHAPES = {
    "1b": Shape("llama_8b", LLAMA_1B, 128256, 4096),
    "410m": Shape("pythia_410m", {}, 50304, 2048),
    "410m-llama": Shape(
        "llama_8b", {"dim": 1024, "n_layers": 24, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 2752}, 50304, 2048
    ),
    "8b4": Shape("llama_8b", {**LLAMA_8B, "n_layers": 4}, 128256, 8192),
    "8b16": Shape("llama_8b", {**LLAMA_8B, "n_layers": 16}, 128256, 8192),
    "tiny": Shape("llama_tiny", {"dim": 64, "n_layers": 5, "ffn_dim": 192}, 512, 64),
}
# GiB by `benchmarks/gpu.py`, see docs/performance.md.
DOCUMENTED = [
    ("8b16", Configuration(kernels="all"), 77.9),
    ("8b16", Configuration(kernels="all", precision="fused"), 82.2),
    ("8b16", Configuration(kernels="all", precision="fused", micro_batch_size=2), 97.6),
    ("1b", Configuration(kernels="all", micro_batch_size=4), 39.8),
]

Case = tuple[str, Configuration]


def cases(tiny: bool) -> list[Case]:
    """What to run: for each shape every layout, recomputation and precision, in the order of what one wants to know first."""
    if tiny:
        some = [("tiny", c) for c in _layouts(2, ("bf16",))]
        return [*some, *(("tiny", _one(2, precision=p)) for p in PRECISIONS[1:])]
    found: list[Case] = []
    sizes = (("1b", 4), ("8b4", 1), ("410m", 8))
    for precision, first in (("bf16", 6), ("fused", 3), ("bf16", None), ("fused", 8)):
        found += [(shape, c) for shape, rows in sizes for c in _layouts(rows, (precision,))[:first]]
        if precision == "fused":
            found += [("8b4", _one(1, precision="fp8")), ("8b4", _one(1, precision="fp8", shard=8))]
            found += [("1b", _one(2)), ("410m", _one(16)), ("8b4", _one(2)), ("1b", _one(4, precision="fp8"))]
    return list(dict.fromkeys(found))


def _one(rows: int, **fields: Any) -> Configuration:
    return Configuration(micro_batch_size=rows, kernels="all", **fields)


def _layouts(rows: int, precisions: Sequence[str]) -> list[Configuration]:
    kinds: list[dict[str, Any]] = [
        {},
        {"shard": 8},
        {"activation_checkpointing": "full"},
        {"shard": 4, "reshard_after_forward": False},
        {"shard": 8, "activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"shard": 4, "micro_batches": 2},
        {"shard": 4, "replicate": 2},
        {"shard": 4, "activation_checkpointing": "selective", "reshard_after_forward": False},
        {"micro_batches": 2},
        {"shard": 8, "micro_batches": 2, "accumulate_without_reduce": False},
    ]
    return [_one(rows, precision=precision, **kind) for precision in precisions for kind in kinds]


def job_of(shape: Shape, compiled: bool = True) -> dict[str, Any]:
    """What a probe of the shape is asked."""
    overrides = [f"model={shape.model}", "data=text", "data.sources=x", "data.tokenizer=bytes"]
    overrides += [f"model.net.{key}={value}" for key, value in {**shape.net, "vocab_size": shape.vocab_size}.items()]
    overrides += [f"data.seq_len={shape.seq_len}", "data.global_batch_size=1"]
    overrides += [] if compiled else ["strategy.compile=false", "strategy.one_pass_optimizer=true"]
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("plan", overrides=overrides)
        OmegaConf.set_struct(cfg, False)
        job = job_for(cfg, PlanSettings(kernels=("none", "all")), PRECISIONS)
    if not compiled:
        for option in PRECISIONS[1:]:
            job["precision"][option]["keep_small"] = False
        job["kernels"]["all"]["backend"] = "reference"
    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(job))  # type: ignore[assignment]
    return plain


# ---- real runs ----------------------------------------------------------------------------------------------------


def run_all(arguments: argparse.Namespace) -> None:
    """Run the configurations one after the other, and write what is known after each."""
    began, device = time.monotonic(), torch.device(arguments.device)
    rows: list[dict[str, Any]] = []
    wanted = [
        case for case in cases(arguments.device == "cpu") if arguments.shapes is None or case[0] in arguments.shapes
    ]
    for shape, configuration in wanted[: arguments.first]:
        if time.monotonic() - began > arguments.budget:
            print(f"{len(wanted) - len(rows)} not run: --budget {arguments.budget:g} s is used up")
            break
        start = time.monotonic()
        row = {"shape": shape, "configuration": asdict(configuration)}
        row |= run_one(job_of(SHAPES[shape], device.type == "cuda"), configuration, device, arguments.steps)
        rows.append(row | {"took": round(time.monotonic() - start, 1)})
        arguments.real.write_text(
            json.dumps({"torch": torch.__version__, "device": _name(device), "rows": rows}, indent=1)
        )
        print(f"{len(rows):3} {shape:5} {_words(configuration):52} {_outcome(rows[-1])}", flush=True)
    print(f"{len(rows)} configurations in {time.monotonic() - began:.0f} s")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def _outcome(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    gib = {name: row[name] / GIB for name in ("allocated", "reserved", "before")}
    return (
        f"{gib['allocated']:8.3f} GiB, reserved {gib['reserved']:6.2f}, before {gib['before']:.3f}, "
        f"step {min(row['seconds']) * 1e3:.0f} ms; {row['took']} s"
    )


def run_one(
    job: dict[str, Any], configuration: Configuration, device: torch.device, steps: int, warmup: int = 1
) -> dict[str, Any]:
    """Peaks and times of one configuration, or the error that it ended with."""
    gc.collect()
    meter = _Meter(device)
    try:
        with process_group(structure_of(configuration), device) as mesh:
            made = assemble(job, structure_of(configuration), mesh, device=device)
            try:
                hold = configuration.accumulate_without_reduce
                rows, times = configuration.micro_batch_size, configuration.micro_batches
                for _ in range(warmup):
                    run_step(made.subject, rows, times, hold)
                seconds = meter.steps(partial(run_step, made.subject, rows, times, hold), steps)
                return {**meter.read(), "seconds": seconds}
            finally:
                made.undo()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # the others are still worth running
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:300]}
    finally:
        torch._dynamo.reset()  # else the many shapes would count as recompilations, and be compiled as dynamic ones


class _Meter:
    """The allocator's peaks on a GPU; a count of storages elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.tracker = device, MemoryTracker()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated()

    def steps(self, step: Callable[[], None], count: int) -> list[float]:
        """Run steps; seconds of each, and from here on the peak counts."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            gc.collect()
            self.tracker.hold(t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
            self.tracker.phase("step")
        seconds = []
        with nullcontext() if self.device.type == "cuda" else self.tracker:
            for _ in range(count):
                began = time.perf_counter()
                step()
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
        return seconds

    def read(self) -> dict[str, Any]:
        if self.device.type != "cuda":
            return {"allocated": self.tracker.peaks["step"], "reserved": 0, "before": 0}
        stats = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {**stats, "before": self.before}


# ---- predictions --------------------------------------------------------------------------------------------------


def compare(
    rows: Sequence[tuple[str, Configuration, float, float | None]], processes: int | None, compiled: bool
) -> None:
    """Predict and print; each row has (shape, configuration, real bytes, reserved bytes or None)."""
    errors, wrong = [], 0
    print(
        f"{'shape':5} {'configuration':52} {'predicted':>9} {'real':>8} {'error':>7} {'reserved':>8}  {'band':>13} GiB"
    )
    for shape in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == shape]
        probed = probe(job_of(SHAPES[shape], compiled), [c for _, c, _, _ in own], processes)
        for _, c, real, reserved in own:
            found = probed[structure_of(c)]
            if found.error:
                print(f"{shape:5} {_words(c):52} not predicted: {found.error}")
                continue
            said = prediction(c, found, SHAPES[shape].seq_len, Outside() if compiled else Outside(workspace=0.0))
            errors.append(said.active / real - 1)
            # The smallest device on which it would have run: tensors, and what lies outside of the allocator.
            outside = Outside().context + (Outside().communication if c.devices > 1 else 0)
            wrong += said.verdict(real + outside * GIB) is Verdict.NO
            shown = "" if reserved is None else f"{reserved / GIB:8.2f}"
            print(
                f"{shape:5} {_words(c):52} {said.active / GIB:9.3f} {real / GIB:8.3f} {errors[-1]:+7.1%} {shown:>8}  "
                f"{said.low / GIB:5.1f} - {said.high / GIB:5.1f}  peak at {said.phase}",
                flush=True,
            )
    sizes = [abs(error) for error in errors]
    print(
        f"{len(errors)} runs: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}; wrong prunes {wrong}"
    )


def read_rows(path: Path) -> Iterator[tuple[str, Configuration, float, float | None]]:
    """What a file of `--real` holds; rows with an error are left out."""
    for row in json.loads(path.read_text())["rows"]:
        if "error" not in row:
            yield row["shape"], Configuration(**row["configuration"]), row["allocated"], row["reserved"]


def _words(c: Configuration) -> str:
    hold = "" if c.micro_batches == 1 or c.devices == 1 else ", held" if c.accumulate_without_reduce else ", reduced"
    layout = c.sharding if c.devices == 1 else f"{c.devices}: {c.sharding}"
    mode = f"{c.activation_checkpointing}{', offload' if c.activation_offload else ''}"
    return f"{c.precision}, {c.micro_batch_size} x {c.micro_batches}{hold}, {layout}, {mode}"


def time_24(processes: int | None) -> None:
    """How long 24 configurations take."""
    space = enumerate_space(4, 64, 1, ("none", "full"), (False,), ("bf16",), ("all",), largest_micro_batch=16)
    space = [c for c in space if c.micro_batch_size in (1, 2, 4, 8) and c.accumulate_without_reduce]
    began = time.perf_counter()
    probed: dict[Structure, Probed] = probe(job_of(SHAPES["1b"]), space, processes)
    found = [prediction(c, probed[structure_of(c)], 4096, Outside()).active / GIB for c in space]
    seconds = time.perf_counter() - began
    print(f"{len(found)} configurations, {len(probed)} structures, {processes or 'all'} processes: {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--real", type=Path, metavar="JSON")
    what.add_argument("--predict", type=Path, metavar="JSON")
    what.add_argument("--documented", action="store_true")
    what.add_argument("--time", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after one that is not")
    parser.add_argument("--first", type=int, help="run so many configurations only")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which no configuration is started")
    parser.add_argument("--processes", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    app.quiet()
    if arguments.real:
        run_all(arguments)
    elif arguments.predict:
        on_cpu = json.loads(arguments.predict.read_text())["device"] == "cpu"
        compare(list(read_rows(arguments.predict)), arguments.processes, not on_cpu)
    elif arguments.documented:
        known = [(s, c, gib * GIB, None) for s, c, gib in DOCUMENTED if not arguments.shapes or s in arguments.shapes]
        compare(known, arguments.processes, True)
    else:
        time_24(arguments.processes)


if __name__ == "__main__":
    main()
