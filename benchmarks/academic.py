"""The table of '$100K or 100 Days' (arXiv:2410.23261) again: Pythia by GPU and number of GPUs, predicted without a GPU.

    python benchmarks/academic.py                      # all, two minutes of a core each; prints the tables of docs/academic.md
    python benchmarks/academic.py --models 1b --out academic.json

The run is Pythia's: 143,000 steps of 1,024 rows of 2,048 tokens, 300 B in all, in bf16. `naive` is a copy of the model on each
GPU, no recomputation, no kernels; `planned` the fastest that fits, with kernels, of {none, full} recomputation x {copies, shard and
keep, shard} x gradients {held whole over the micro-batches, reduced in each}, and offload with full recomputation. Memory is
followed for 1 and 2 devices, and scaled for 4 and 8. Days in parentheses may fit (the band of the prediction reaches over the
capacity).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lightning_fms import app
from lightning_fms.planner.candidates import Candidate, chosen
from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.memory import Verdict
from lightning_fms.planner.settings import PlanSettings
from lightning_fms.planner.space import Configuration, enumerate_space
from lightning_fms.planner.throughput import DAY, Work
from lightning_fms.planning.jobs import Probed, probe, structure_of
from lightning_fms.planning.plan import elsewhere, judged, with_activations
from lightning_fms.planning.scope import count_work, job_for
from lightning_fms.planning.subject import Structure

MODELS = ("160m", "410m", "1b", "1_4b", "2_8b", "6_9b")
GPUS = ("rtx3090", "a6000", "a100", "h100", "h200")
COUNTS = (1, 2, 4, 8)
STEPS, ROWS, TOKENS, VOCABULARY = 143_000, 1024, 2048, 50_304
LARGEST = 64


def config(model: str, gpu: str) -> Any:
    chosen = [f"model=pythia_{model}", "data=text", f"hardware={gpu}", f"model.net.vocab_size={VOCABULARY}"]
    chosen += [f"data.seq_len={TOKENS}", f"data.global_batch_size={ROWS}", "data.sources=x", "data.tokenizer=bytes"]
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        cfg = compose("plan", overrides=chosen)
        OmegaConf.set_struct(cfg, False)
        job = job_for(cfg, PlanSettings(kernels=("none", "all")), ["bf16"])
    return cfg, job


def spaces(devices: int) -> tuple[list[Configuration], list[Configuration]]:
    """Naive and planned configurations."""
    every = enumerate_space(devices, ROWS, 1, ("none", "full"), largest_micro_batch=LARGEST)
    naive = [c for c in every if _plain(c) and c.activation_checkpointing == "none" and c.kernels == "none"]
    planned = [
        c for c in every
        if c.kernels == "all"
        and (not c.cpu_offload or (c.activation_checkpointing == "full" and c.reshard_after_forward))
        and (c.activation_checkpointing == "none" or c.reshard_after_forward)
    ]  # fmt: skip
    return naive, planned


def _plain(c: Configuration) -> bool:
    return c.shard == 1 and not c.cpu_offload


def tables(models: Sequence[str], processes: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in models:
        cfg, job = config(model, GPUS[0])
        work = count_work(cfg)
        needed = [c for devices in (1, 2) for part in spaces(devices) for c in part]
        probed = probe(job, needed, processes)
        errors = {p.error for p in probed.values() if p.error}
        if errors:
            raise SystemExit(f"{model}: {errors}")
        work = with_activations(work, probed)
        devices: list[Hardware] = [app.plugin(config(model, gpu)[0].hardware) for gpu in GPUS]
        found[model] = {gpu.name: {n: cell(n, gpu, work, probed) for n in COUNTS} for gpu in devices}
        print(markdown(model, work, found[model]), flush=True)
    return found


def cell(devices: int, hardware: Hardware, work: Work, probed: dict[Structure, Probed]) -> dict[str, Any]:
    naive, planned = (
        chosen([k for c in space if (k := candidate(c, hardware, work, probed)) is not None])
        for space in spaces(devices)
    )
    return {"naive": plain(naive), "planned": plain(planned)}


def candidate(c: Configuration, hardware: Hardware, work: Work, probed: dict[Structure, Probed]) -> Candidate | None:
    known = probed.get(structure_of(c))
    return elsewhere(c, probed, work, hardware, 2, 2) if known is None else judged(c, known, work, hardware, 2)


def plain(c: Candidate | None) -> dict[str, Any] | None:
    if c is None:
        return None
    days = c.time.estimate * STEPS / DAY
    return {
        "days": days, "fits": c.verdict is Verdict.FIT, "rows": c.configuration.micro_batch_size,
        "layout": c.configuration.sharding, "recompute": c.configuration.activation_checkpointing,
        "held": c.configuration.accumulate_without_reduce,
        "offload": c.configuration.cpu_offload, "mfu": c.time.mfu, "gib": c.memory.active / 2**30,
    }  # fmt: skip


def markdown(model: str, work: Work, rows: dict[str, Any]) -> str:
    lines = [f"\n### Pythia {model.replace('_', '.').upper()}: {work.parameters / 1e9:.2f} B parameters\n"]
    lines += [
        "| days, naive -> planned | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in COUNTS) + " |",
        "|---" * 5 + "|",
    ]
    for gpu, counts in rows.items():
        cells = [f"{shown(c['naive'])} -> {shown(c['planned'])}{how(c['planned'])}" for c in counts.values()]
        lines.append(f"| {gpu} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(c: dict[str, Any] | None) -> str:
    if c is None:
        return "no"
    days = f"{c['days']:,.0f}" if c["days"] >= 10 else f"{c['days']:.1f}"
    return days if c["fits"] else f"({days})"


def how(c: dict[str, Any] | None) -> str:
    if c is None:
        return ""
    words = {"one device": "", "2 copies": "", "4 copies": "", "8 copies": ""}.get(c["layout"], c["layout"])
    marks = {"reduce": not c["held"], "recompute": c["recompute"] == "full", "offload": c["offload"]}
    parts = [words, *(mark for mark, holds in marks.items() if holds)]
    said = ", ".join(part for part in parts if part)
    return f", {said}" if said else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = tables(arguments.models, arguments.processes)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
