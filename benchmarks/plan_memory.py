"""Predicted against real peak memory, and how long predictions take.

    python benchmarks/plan_memory.py               # the eight runs of docs/performance.md: predicted without a GPU
    python benchmarks/plan_memory.py --time        # 24 configurations of Llama 1B on 4 ranks, seconds

The real numbers are `torch.cuda.max_memory_allocated` of `benchmarks/gpu.py` on one H200 (docs/performance.md, columns `peak
GiB`), so a prediction is compared with what tensors take, without context and fragmentation. The models and batches are
those of `benchmarks/workload.py`.
"""

import argparse
import statistics
import time

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_fms.planner.memory import GIB, Outside
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration, enumerate_space
from lightning_fms.planning.jobs import prediction, probe, structure_of
from lightning_fms.planning.plan import job_for

# Shape of the model, tokens of a row, rows; GiB by (precision, kernels).
SHAPES = {
    "8b16": ({"dim": 4096, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}, 8192, 1),
    "1b": ({"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192}, 4096, 4),
}
REAL = {
    ("8b16", "bf16", "all"): 77.9, ("8b16", "fused", "all"): 82.2,
    ("1b", "bf16", "all"): 40.3, ("1b", "fused", "all"): 40.5,
}  # fmt: skip


def config(shape: str) -> DictConfig:
    net, seq_len, rows = SHAPES[shape]
    overrides = ["model=llama_8b", "data=text", "data.sources=x", "data.tokenizer=bytes", "model.net.vocab_size=128256"]
    overrides += [f"model.net.{key}={value}" for key, value in net.items()]
    overrides += [f"data.seq_len={seq_len}", f"data.global_batch_size={rows}"]
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("plan", overrides=overrides)
        OmegaConf.set_struct(cfg, False)
        cfg.job = job_for(cfg, PlanSettings(kernels=("none", "all")), ["bf16", "fp8", "fused"])
    return cfg


def compare(shapes: list[str]) -> None:
    errors = []
    print(f"{'shape':6} {'precision':9} {'kernels':7} {'predicted':>9} {'real':>6} {'error':>7}   GiB")
    for shape in shapes:
        cfg, (_, seq_len, rows) = config(shape), SHAPES[shape]
        cases = {(p, k): real for (s, p, k), real in REAL.items() if s == shape}
        wanted = {(p, k): Configuration(precision=p, kernels=k, micro_batch_size=rows) for p, k in cases}
        probed = probe(OmegaConf.to_container(cfg.job), list(wanted.values()), None)  # type: ignore[arg-type]
        for (precision, kernels), configuration in wanted.items():
            found = probed[structure_of(configuration)]
            if found.error:
                raise SystemExit(found.error)
            active = prediction(configuration, found, seq_len, Outside()).active / GIB
            real = cases[precision, kernels]
            errors.append(active / real - 1)
            print(f"{shape:6} {precision:9} {kernels:7} {active:9.1f} {real:6.1f} {errors[-1]:+7.1%}", flush=True)
    sizes = [abs(error) for error in errors]
    print(f"{len(errors)} runs: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


def time_24(processes: int) -> None:
    cfg = config("1b")
    space = enumerate_space(4, 64, 1, ("none", "full"), (False,), ("bf16",), ("all",), largest_micro_batch=16)
    space = [c for c in space if c.micro_batch_size in (1, 2, 4, 8) and c.accumulate_without_reduce]
    began = time.perf_counter()
    probed = probe(OmegaConf.to_container(cfg.job), space, processes)  # type: ignore[arg-type]
    found = [prediction(c, probed[structure_of(c)], 4096, Outside()).active / GIB for c in space]
    seconds = time.perf_counter() - began
    print(f"{len(found)} configurations, {len(probed)} structures, {processes} processes: {seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    time_24(arguments.processes) if arguments.time else compare(arguments.shapes)


if __name__ == "__main__":
    main()
