"""The process in which `fms-plan` follows training steps of fake tensors: `python -m lightning_fms.planning.probe JOB RESULTS`.

Here the planner's probe meets the suite: the model comes from the config, and kernels, FP8 and sharding are applied by the
code that a real run uses, in its order. It is a process of its own because of what it does to PyTorch: a process group
without other ranks, and `Module.to` that takes fake tensors.

JOB is a JSON file: the plain `config` (groups `model`, `data`, ...), options of `precision` and `kernels` by name, `rows` to
probe, and `structures`, each what is common to configurations that differ in rows only. RESULTS gets a line for each, as
soon as it is known.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fms import app
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.planner.fused import Graphs
from lightning_fms.planner.probe import depth_pair, measure
from lightning_fms.planner.tracker import MemoryTracker
from lightning_fms.planning.fake_tensors import accept_fake_tensors
from lightning_fms.planning.subject import Structure, assemble, process_group
from lightning_fms.train import one_line

OFFLOAD_REACH = 3  # blocks: one leaves while the next computes, and two are back before their backward


def run_job(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Probe each structure of a job; one that fails is a result with its `error`."""
    accept_fake_tensors()
    graphs, fake = Graphs(("_fused_weights",)), FakeTensorMode()
    for fields in job["structures"]:
        structure = Structure(**{**fields, "variants": tuple(fields["variants"])})
        try:
            yield _probe(job, structure, graphs, fake)
        except Exception as error:  # Whatever a user's model may raise, the others can still be planned.
            yield {"error": f"{type(error).__name__}: {one_line(error)}"}


def _probe(job: Mapping[str, Any], structure: Structure, graphs: Graphs, fake: FakeTensorMode) -> dict[str, Any]:
    checkpoint_every = job["config"]["strategy"].get("checkpoint_every", 2)
    period = checkpoint_every if structure.activation_checkpointing == "selective" else 1
    result: dict[str, Any] = {"grid": {variant: {} for variant in structure.variants}}
    with process_group(structure) as mesh, fake:
        named = job["config"]["strategy"].get("blocks")
        depth = len(find_blocks(app.lightning_module(OmegaConf.create(job["config"])), named))
        for blocks in depth_pair(depth, period, _reach(structure, job["config"]["strategy"].get("prefetch", 1))):
            graphs.tracker = MemoryTracker()
            made = assemble(job, structure, mesh, blocks if blocks != depth else None, graphs=graphs)
            result |= {"head": made.head, "groups": made.groups}
            for rows in job["rows"]:
                found = measure(made.subject, graphs.tracker, rows, period, structure.variants)
                for variant, peaks in found.items():
                    result["grid"][variant][f"{rows},{len(made.subject.blocks)}"] = peaks
    return {**result, "depth": depth}


def _reach(structure: Structure, prefetch: int) -> int:
    """How many blocks away a block still has memory: on its way to the host, gathered early, or in a reduction that runs."""
    return max(OFFLOAD_REACH if structure.activation_offload else 0, prefetch if structure.wrapped else 0)


def main() -> None:
    """Probe a job and write the results."""
    warnings.simplefilter("ignore")
    app.quiet()
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "w") as results:
        for result in run_job(job):
            results.write(json.dumps(result) + "\n")
            results.flush()
    os._exit(0)  # Python would spend seconds on taking torch apart.


if __name__ == "__main__":
    main()
