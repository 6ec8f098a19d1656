"""What the planner chooses against the best of all: Llama 1B on one GPU, every configuration measured.

    python benchmarks/plan_choice.py --real choice.json        # on a machine with one GPU: time all configurations
    python benchmarks/plan_choice.py --choose choice.json      # anywhere: what the planner would have chosen, and what that costs

The space is that of `fms-plan` on one GPU without offload: recomputation {none, selective, full} x {bf16, FP8 fused} x every
micro-batch of 2 rows and more, at 8 rows of 2,048 tokens a step. Steps are whole optimizer steps of the model as the strategy
places it (`planning.subject`: kernels, compiled blocks, the optimizer in one pass), on constant tokens, the device synchronised
after each; the median counts, without those of the warm-up. First all configurations run `--steps` steps, then the
better third more, then the best three again: as the planner's own rounds, but for everyone.

`--choose` predicts memory and time without a GPU, takes the planner's first nine, and halves them with the measured times. The best
of all is the fastest of the longest round. Ratio 1.00 = the planner found it.
"""

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from plan_memory import SHAPES, Shape, run_one

from lightning_fms import app
from lightning_fms.planner.candidates import Candidate, ranked
from lightning_fms.planner.measure import Trial, halve
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration, enumerate_space
from lightning_fms.planning.jobs import probe, structure_of
from lightning_fms.planning.plan import judged, with_activations
from lightning_fms.planning.scope import count_work, job_for

ROWS, LEAST_ROWS = 8, 2
PRECISIONS = ("bf16", "fused")
FIRST = PlanSettings().measure_first
LONGER = (15, 30)  # steps of the second and third round
LLAMA_1B = Shape("llama_8b", SHAPES["1b"].net, 128256, 2048)


def space(tiny: bool = False) -> list[Configuration]:
    """All configurations, ours to measure and the planner's to choose from."""
    every = enumerate_space(1, ROWS, 1, ("none", "full", "selective"), (False,), PRECISIONS, ("all",))
    every = [c for c in every if c.micro_batch_size >= LEAST_ROWS]
    # Selective last: it runs the code that the other two have compiled.
    every.sort(key=lambda c: (c.activation_checkpointing == "selective", c.precision, -c.micro_batch_size))
    return every[:2] if tiny else every


def config(shape: Shape, gpu: str, compiled: bool) -> tuple[Any, dict[str, Any]]:
    """The composed config, and the job of probes and runs."""
    overrides = [f"model={shape.model}", "data=text", "data.sources=x", "data.tokenizer=bytes", f"hardware={gpu}"]
    overrides += [f"model.net.{key}={value}" for key, value in {**shape.net, "vocab_size": shape.vocab_size}.items()]
    overrides += [f"data.seq_len={shape.seq_len}", f"data.global_batch_size={ROWS}"]
    overrides += [] if compiled else ["strategy.compile=false", "strategy.one_pass_optimizer=true"]
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("plan", overrides=overrides)
        with open_dict(cfg):
            job = job_for(cfg, PlanSettings(kernels=("all",)), PRECISIONS)
    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(job))  # type: ignore[assignment]
    return cfg, plain


def measure_all(arguments: argparse.Namespace) -> None:
    """Three rounds; the JSON holds the times of each."""
    began, device = time.monotonic(), torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    _, job = config(LLAMA_1B if on_gpu else SHAPES["tiny"], "h200", on_gpu)
    if not on_gpu:
        job["kernels"]["all"]["backend"] = "reference"
    rows = [{"configuration": asdict(c), "seconds": {}} for c in space(not on_gpu)]
    left = list(rows)
    for steps in (arguments.steps, *LONGER[: 2 if on_gpu else 0]):
        for row in left:
            if time.monotonic() - began > arguments.budget:
                row.setdefault("error", "not run: --budget is used up")
                continue
            c = Configuration(**row["configuration"])
            found = run_one(job, c, device, steps, warmup=2)
            if "error" in found:
                row["error"] = found["error"]
            else:
                row["seconds"][str(steps)] = statistics.median(found["seconds"])
            print(f"{time.monotonic() - began:5.0f} s  {steps:3} steps  {words(c):36} {said(row, steps)}", flush=True)
            arguments.real.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
        left = sorted((row for row in left if str(steps) in row["seconds"]), key=lambda row: row["seconds"][str(steps)])
        left = left[: max(math.ceil(len(left) / 3), 3)]


def said(row: dict[str, Any], steps: int) -> str:
    """The time of a row, or its error."""
    return f"{row['seconds'][str(steps)] * 1e3:.1f} ms" if str(steps) in row["seconds"] else row.get("error", "")


def words(c: Configuration) -> str:
    """A configuration of one device."""
    return f"{c.precision}, {c.activation_checkpointing}, {c.micro_batch_size} x {c.micro_batches}"


# ---- the choice ---------------------------------------------------------------------------------------------------


def choose(arguments: argparse.Namespace) -> None:
    """Rank without a GPU, halve by the measured times, and compare."""
    rows = json.loads(arguments.choose.read_text())["rows"]
    seconds = {Configuration(**row["configuration"]): row["seconds"] for row in rows}
    missing = [row for row in rows if not row["seconds"]]
    order = ranked(estimated(list(seconds), arguments.hardware, arguments.processes))
    print(f"{'':4} {'configuration':36} {'estimate':>9} {'measured':>9}  ms")
    for i, candidate in enumerate(order):
        c = candidate.configuration
        print(f"{i + 1:3}. {words(c):36} {candidate.time.estimate * 1e3:9.1f} {longest(seconds[c]) * 1e3:9.1f}")
    first = [candidate.configuration for candidate in order[:FIRST]]
    steps = [int(s) for s in sorted({s for known in seconds.values() for s in known}, key=int)]

    def trial(c: Configuration, count: int) -> Trial:
        known = [s for s in seconds[c] if int(s) <= count]
        return Trial([seconds[c][max(known, key=int)]] * 3) if known else Trial(error="not measured")

    found = halve(first, trial, steps).fastest
    assert found is not None
    best = min((c for c in seconds if str(steps[-1]) in seconds[c]), key=lambda c: seconds[c][str(steps[-1])])
    by_estimate = order[0].configuration
    print(f"{len(seconds) - len(missing)} of {len(seconds)} configurations measured; best of all: {words(best)}")
    for name, c in (("by estimate alone", by_estimate), (f"by measuring the first {len(first)}", found)):
        print(f"chosen {name}: {words(c)}, {longest(seconds[c]) / longest(seconds[best]):.3f} of the best's time")


def longest(known: dict[str, float]) -> float:
    """The time of the round with most steps."""
    return known[max(known, key=int)] if known else math.inf


def estimated(configurations: Sequence[Configuration], gpu: str, processes: int | None) -> list[Candidate]:
    """Memory and time as `fms-plan` predicts them."""
    cfg, job = config(LLAMA_1B, gpu, True)
    probed = probe(job, configurations, processes)
    work = with_activations(count_work(cfg), probed)
    hardware = app.plugin(cfg.hardware)
    return [judged(c, probed[structure_of(c)], work, hardware, 2) for c in configurations]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--real", type=Path, metavar="JSON")
    what.add_argument("--choose", type=Path, metavar="JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hardware", default="h200", help="for estimates")
    parser.add_argument("--steps", type=int, default=6, help="of the first round")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing is started")
    parser.add_argument("--processes", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    app.quiet()
    measure_all(arguments) if arguments.real else choose(arguments)


if __name__ == "__main__":
    main()
