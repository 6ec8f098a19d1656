"""Put a module on this rank's device(s) in the one order in which the pieces compose; torch only.

    activation checkpointing -> compile each block -> activation offload -> each block, then the root: materialise from meta,
    split between tensor ranks, shard

On one device nothing is wrapped; bf16 then means `master.MasterWeights`, with the numerics that FSDP2 has on many.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_fms.distributed import activation
from lightning_fms.distributed.activation import kept_by_the_compiler
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.distributed.compile import compile_blocks
from lightning_fms.distributed.master import MasterWeights
from lightning_fms.distributed.materialize import Materializer, check_materializable, on_meta
from lightning_fms.distributed.mesh import TENSOR, fsdp_mesh
from lightning_fms.distributed.offload import offload_blocks
from lightning_fms.distributed.report import SetupReport
from lightning_fms.distributed.shard import (
    check_prefetch,
    choose_groups,
    copy_views_of_groups,
    is_sharded,
    prefetch_groups,
    shard_module,
    silence_view_warning,
)
from lightning_fms.distributed.tensor_parallel import Split, wait_at
from lightning_fms.distributed.tensor_plan import Plan


@dataclass(frozen=True)
class Settings:
    """What the user chose; see `strategy.FSDPCompileStrategy` for each."""

    blocks: Sequence[str] | None = None
    compile: bool | str = "auto"
    compile_strict: bool = False
    compile_options: Mapping[str, Any] | None = None
    activation_checkpointing: str = "none"
    checkpoint_every: int = 2
    save_ops: Sequence[str] | str | None = None
    activation_budget: float = 0.5
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    tensor_plan: Plan | str = "auto"
    activation_offload: bool = False
    prefetch: int = 1

    def __post_init__(self) -> None:
        mode = self.activation_checkpointing
        activation.check_mode(mode, self.checkpoint_every, self.save_ops, self.activation_budget)
        if mode == "budget" and self.compile is False:
            raise ValueError(
                "activation_checkpointing='budget' is the compiler's choice, and compile=False: set compile=True"
            )
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile={self.compile!r}: give True, False or 'auto'")
        check_prefetch(self.prefetch)


@dataclass
class Placed:
    """The outcome: a report, the fp32 masters (one device in bf16 only), and what has to be undone."""

    report: SetupReport = field(default_factory=SetupReport)
    masters: MasterWeights | None = None
    forwards: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    restore_warnings: Callable[[], None] = lambda: None
    restore_budget: Callable[[], None] = lambda: None

    def undo(self) -> None:
        """Give back the modules' own `forward` and the warnings. A sharded module stays sharded."""
        for module, (before, ours) in self.forwards.items():
            if module.__dict__.get("forward") is ours:  # else someone has replaced it since
                del module.forward
                if before is not None:
                    module.forward = before
        self.forwards.clear()
        if self.masters is not None:
            self.masters.release()
        self.restore_warnings()
        self.restore_budget()


def place(
    module: nn.Module,
    settings: Settings,
    mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    fsdp_policy: MixedPrecisionPolicy,
    masters: bool,
) -> Placed:
    """Recompute, compile and shard a module in place.

    Args:
        module: the root; a module that is sharded already stays as it is.
        settings: the user's.
        mesh: with the dimensions of `mesh.build_mesh`; None for one device, without any wrapping.
        device: of this rank.
        seed: of weights that are made from `meta`.
        fsdp_policy: precision of gathered parameters and reduced gradients.
        masters: on one device, compute with bf16 copies of fp32 parameters.

    Raises:
        ValueError: unknown block classes, `meta` tensors without `reset_parameters`, or a tensor plan that does not fit.
    """
    blocks = find_blocks(module, settings.blocks)
    placed = Placed(SetupReport(blocks=list(blocks)))
    before = {m: m.__dict__.get("forward") for m in module.modules()}
    report = placed.report
    compiles = settings.compile is True or (settings.compile == "auto" and device.type == "cuda")
    recompute = partial(
        activation.checkpoint_blocks,
        blocks,
        settings.activation_checkpointing,
        settings.checkpoint_every,
        settings.save_ops,
    )
    apart = {block for block in blocks.values() if compiles and not settings.save_ops and kept_by_the_compiler(block)}
    report.recomputed = recompute(where=lambda block: block not in apart)
    if settings.activation_checkpointing == "budget" and not compiles:
        raise ValueError(
            f"activation_checkpointing='budget' is the compiler's choice, and compile={settings.compile!r} runs none "
            f"on {device.type}: set compile=True"
        )
    if compiles:
        report.compiled = compile_blocks(blocks, settings.compile_options, settings.compile_strict, report.notes.append)
        report.recomputed += recompute(where=lambda block: block in apart)
    if settings.activation_offload:  # outside of the compiled block: moved is what the compiler saves
        report.notes.append(
            f"activations moved to the host: {len(offload_blocks(blocks, device)[1])} of {len(blocks)} blocks"
        )
    if is_sharded(module):
        placed.restore_warnings = silence_view_warning()
        copy_views_of_groups(module)
        report.notes.append("already sharded (by an earlier run, or by `configure_model`): left as it is")
    elif mesh is not None:
        _shard(module, blocks, settings, mesh, device, seed, fsdp_policy, placed)
    else:
        _fill_one_device(module, device, seed)
        if settings.prefetch > 1:
            report.notes.append(f"prefetch={settings.prefetch} has nothing to gather on one device")
        if masters:
            placed.masters = MasterWeights(module)
            report.precision = f": {len(placed.masters)} fp32 masters with bf16 copies"
    if settings.activation_checkpointing == "budget":  # last: it has to be undone, also where something above raises
        placed.restore_budget = activation.set_budget(settings.activation_budget)
        report.notes.append(f"activations: the compiler keeps {settings.activation_budget:.0%} of each block's")
    after = {m: m.__dict__.get("forward") for m in before}
    placed.forwards = {m: (before[m], after[m]) for m in before if after[m] is not before[m]}
    return placed


def _shard(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    settings: Settings,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
    fsdp_policy: MixedPrecisionPolicy,
    placed: Placed,
) -> None:
    check_materializable(module)
    groups, notes = choose_groups(module, blocks)
    split = None
    if mesh[TENSOR].size() > 1:
        plan = Split(module, settings.tensor_plan, mesh[TENSOR].size())
        split = partial(plan.apply, mesh=mesh[TENSOR])
        wait_at(blocks[name] for name in placed.report.compiled)
        notes.append(f"split over {mesh[TENSOR].size()} tensor ranks: {len(plan)} modules, plan {plan.source}")
    placed.restore_warnings = silence_view_warning()
    shard_module(
        module,
        groups,
        fsdp_mesh(mesh),
        device,
        Materializer(device, seed),
        fsdp_policy,
        settings.reshard_after_forward,
        settings.cpu_offload,
        split,
    )
    if settings.prefetch > 1:
        prefetch_groups(module, groups, settings.prefetch)
        notes.append(f"gathered ahead: {settings.prefetch} groups")
    if not settings.cpu_offload:
        module.to(device)  # what is no parameter, e.g. the states of metrics
    placed.report.sharded = list(groups)
    placed.report.notes += notes


def _fill_one_device(module: nn.Module, device: torch.device, seed: int) -> None:
    if on_meta(module):
        check_materializable(module)
        Materializer(device, seed).fill(module.named_modules())
    module.to(device)
