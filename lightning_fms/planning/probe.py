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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_fms import app
from lightning_fms.distributed import policy, shard
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.distributed.mesh import build_mesh, resolve_mesh
from lightning_fms.distributed.place import Placed, Settings, place
from lightning_fms.kernels import swap
from lightning_fms.planner.fused import Graphs
from lightning_fms.planner.probe import Subject, depth_pair, fake_safe_swap, keep_blocks, measure
from lightning_fms.planner.tracker import MemoryTracker
from lightning_fms.precision.recipes import Recipe
from lightning_fms.precision.selection import decide
from lightning_fms.train import one_line

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Structure:
    """What configurations share that need the same probes.

    Attributes:
        replicate: copies of the model.
        shard: ranks that share one.
        wrapped: whether `fully_shard` is applied (always on several ranks; on one only for offload).
        activation_checkpointing: a mode.
        reshard_after_forward: gather again in backward.
        precision: an option.
        kernels: an option.
        variants: of the step, see `probe.VARIANTS`.
    """

    replicate: int
    shard: int
    wrapped: bool
    activation_checkpointing: str
    reshard_after_forward: bool
    precision: str
    kernels: str
    variants: tuple[str, ...]


def run_job(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Probe each structure of a job; one that fails is a result with its `error`."""
    fake_safe_swap()
    swap._needs_real_logits = _needs_real_logits
    graphs, fake = Graphs(), FakeTensorMode()
    for fields in job["structures"]:
        structure = Structure(**{**fields, "variants": tuple(fields["variants"])})
        try:
            yield _probe(job, structure, graphs, fake)
        except Exception as error:  # Whatever a user's model may raise, the others can still be planned.
            yield {"error": f"{type(error).__name__}: {one_line(error)}"}


def _needs_real_logits(head: nn.Linear, input: Tensor) -> bool:
    """As the kernels decide for real tensors; they pass fake ones by."""
    return any(isinstance(m, FSDPModule) for m in head.__dict__[swap._STATE].ancestors)


def _probe(job: Mapping[str, Any], structure: Structure, graphs: Graphs, fake: FakeTensorMode) -> dict[str, Any]:
    checkpoint_every = job["config"]["strategy"].get("checkpoint_every", 2)
    period = checkpoint_every if structure.activation_checkpointing == "selective" else 1
    result: dict[str, Any] = {"grid": {variant: {} for variant in structure.variants}}
    with _process_group(structure) as mesh, fake:
        named = job["config"]["strategy"].get("blocks")
        depth = len(find_blocks(app.lightning_module(OmegaConf.create(job["config"])), named))
        for blocks in depth_pair(depth, period):
            graphs.tracker = MemoryTracker()
            subject, facts = _subject(job, structure, mesh, graphs, blocks if blocks != depth else None)
            result |= facts
            for rows in job["rows"]:
                found = measure(subject, graphs.tracker, rows, period, structure.variants)
                for variant, peaks in found.items():
                    result["grid"][variant][f"{rows},{len(subject.blocks)}"] = peaks
    return {**result, "depth": depth}


@contextmanager
def _process_group(structure: Structure) -> Iterator[DeviceMesh | None]:
    """A process group of one, that believes in the others; the mesh has to be built before tensors are fake."""
    if not structure.wrapped:
        yield None
        return
    ranks = structure.replicate * structure.shard
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield build_mesh(resolve_mesh(ranks, structure.replicate, structure.shard), "cpu")
    finally:
        dist.destroy_process_group()


def _subject(
    job: Mapping[str, Any], structure: Structure, mesh: DeviceMesh | None, graphs: Graphs, depth: int | None
) -> tuple[Subject, dict[str, Any]]:
    cfg = OmegaConf.create(job["config"])
    module = app.lightning_module(cfg)
    blocks = find_blocks(module, cfg.strategy.get("blocks"))
    if depth is not None and keep_blocks(module, list(blocks), depth):
        blocks = find_blocks(module, cfg.strategy.get("blocks"))
    facts: dict[str, Any] = {"head": _swap_kernels(module, job["kernels"][structure.kernels])}
    plugin = _precision(job["precision"][structure.precision])
    if hasattr(plugin, "recipe"):
        _convert(module, plugin, structure.shard)
    if cfg.strategy.get("compile", "auto") is not False:
        graphs.fuse(blocks)
    settings = Settings(
        cfg.strategy.get("blocks"), False, activation_checkpointing=structure.activation_checkpointing,
        checkpoint_every=cfg.strategy.get("checkpoint_every", 2), reshard_after_forward=structure.reshard_after_forward,
    )  # fmt: skip
    groups, _ = shard.choose_groups(module, blocks)
    facts["groups"] = sorted(_group_bytes(module, list(groups.values())), reverse=True)[:2]
    placed = place(
        module, settings, mesh, CPU, 0, policy.fsdp_policy(plugin), policy.computes_in_bf16(plugin) and mesh is None
    )
    return _assembled(module, blocks, placed, cfg.data.seq_len), facts


def _assembled(module: Any, blocks: Mapping[str, nn.Module], placed: Placed, seq_len: int) -> Subject:
    masters = placed.masters

    def hold(whole: bool) -> None:
        for group in shard.fsdp_modules(module):
            group.set_requires_gradient_sync(not whole, recurse=False)

    def before_step() -> None:
        shard.reshard(module)
        if masters is not None:
            masters.invalidate()

    return Subject(
        module=module,
        blocks=blocks,
        training_step=lambda rows: _loss(module.training_step(_batch(rows, seq_len), 0)),
        optimizers=_optimizers(module.configure_optimizers()),
        computing=masters.active if masters is not None else nullcontext,
        hold_gradients=hold,
        before_step=before_step,
        long_lived=[] if masters is None else masters._copies,
    )


def _batch(rows: int, seq_len: int) -> dict[str, Tensor]:
    names = ("input_ids", "labels", "position_ids", "document_ids")
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64) for name in names}
    return {**batch, "row_valid": torch.ones(rows, dtype=torch.bool)}


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(f"training_step returned {type(loss).__name__}: a plan needs the loss, or a dict with it")
    return loss


def _optimizers(configured: Any) -> list[Optimizer]:
    if isinstance(configured, Mapping):
        return [configured["optimizer"]]
    if isinstance(configured, Sequence):
        first = configured[0] if configured and isinstance(configured[0], Sequence) else configured
        return [optimizer for entry in first for optimizer in _optimizers(entry)]
    return [configured]


def _swap_kernels(module: nn.Module, config: Mapping[str, Any]) -> list[int] | None:
    """Swap as on a GPU; the shape [V, D] of an output head whose logits are deferred."""
    if "_target_" not in config:
        return None
    callback = app.plugin(OmegaConf.create({**config, "backend": "reference", "rms_norm": False, "verify": False}))
    callback.transform_module(module)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and swap.is_swapped(m)]
    return list(heads[0].weight.shape) if heads else None


def _precision(config: Mapping[str, Any]) -> Precision:
    if "_target_" in config:
        return app.plugin(OmegaConf.create(dict(config)))
    plugins = {"bf16-mixed": policy.BF16Mixed, "32-true": Precision}
    if config["name"] not in plugins:
        raise ValueError(f"precision.name={config['name']}: can be planned for {', '.join(plugins)} and FP8Precision")
    return plugins[config["name"]]()


def _convert(module: nn.Module, plugin: Any, shards: int) -> None:
    """To FP8, as the plugin does behind its checks of the device."""
    decisions = decide(module, plugin.recipe, head=plugin.head, keep_small=plugin.keep_small, skip=plugin.skip)
    Recipe(plugin.recipe, all_gather=plugin.all_gather).convert(module, decisions, shards)


def _group_bytes(module: nn.Module, groups: Sequence[nn.Module]) -> list[int]:
    sizes = [{p: p.numel() * p.element_size() for p in group.parameters()} for group in groups]
    inside = {p for size in sizes for p in size}
    root = {p: p.numel() * p.element_size() for p in module.parameters() if p not in inside}
    return [sum(size.values()) for size in [*sizes, root]]


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
