"""A module placed as the strategy places it, with steps to run by hand: on fake tensors to predict, on a GPU to compare.

The code of a real run does everything here, in its order: kernels, FP8, sharding or bf16 copies, the optimizer in one pass.
So a prediction follows what the suite does by construction. What fake tensors cannot do (they have no addresses and no
values) is replaced in one place, `fake_tensors`, by what takes the same memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from lightning_fms import app
from lightning_fms.distributed import activation, one_pass_optimizer, policy, shard, surroundings
from lightning_fms.distributed.blocks import find_blocks
from lightning_fms.distributed.mesh import build_mesh, resolve_mesh
from lightning_fms.distributed.place import Placed, Settings, place
from lightning_fms.kernels import swap
from lightning_fms.planner.fused import Graphs
from lightning_fms.planner.probe import Subject, keep_blocks, use_gpu_defaults
from lightning_fms.planning import fake_tensors
from lightning_fms.precision.fused import FusedWeights
from lightning_fms.precision.recipes import FUSED, Recipe, restore
from lightning_fms.precision.selection import decide

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
        activation_offload: whether what blocks keep lies on the host.
    """

    replicate: int
    shard: int
    wrapped: bool
    activation_checkpointing: str
    reshard_after_forward: bool
    precision: str
    kernels: str
    variants: tuple[str, ...]
    activation_offload: bool = False


@contextmanager
def process_group(structure: Structure, device: torch.device = CPU) -> Iterator[DeviceMesh | None]:
    """A process group of one, that believes in the others; the mesh has to be built before tensors are fake."""
    if not structure.wrapped:
        yield None
        return
    ranks = structure.replicate * structure.shard
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield build_mesh(resolve_mesh(ranks, structure.replicate, structure.shard), device.type)
    finally:
        dist.destroy_process_group()


@dataclass
class Assembled:
    """A subject, what is known of it, and what gives everything outside of it back.

    Attributes:
        subject: to run.
        head: shape [V, D] of an output head with deferred logits.
        groups: bytes of the two largest groups of parameters, unsharded.
        undo: called at the end.
    """

    subject: Subject
    head: list[int] | None
    groups: list[int]
    undo: Callable[[], None]


def assemble(
    job: Mapping[str, Any],
    structure: Structure,
    mesh: DeviceMesh | None,
    depth: int | None = None,
    device: torch.device = CPU,
    graphs: Graphs | None = None,
) -> Assembled:
    """Build the model of a job and place it.

    Args:
        job: plain `config`, options of `precision` and `kernels` by name.
        structure: how to place it.
        mesh: from `process_group`.
        depth: keep so many blocks; None keeps all.
        device: of this rank.
        graphs: for fake tensors: blocks as if compiled. None: real tensors, and the strategy's own compiling.
    """
    cfg = OmegaConf.create(job["config"])
    with torch.device("meta") if graphs is None else nullcontext():
        module = app.lightning_module(cfg)
    blocks = find_blocks(module, cfg.strategy.get("blocks"))
    if depth is not None and keep_blocks(module, list(blocks), depth):
        blocks = find_blocks(module, cfg.strategy.get("blocks"))
    with ExitStack() as undo:
        with unset_fake_temporarily():  # kernels and FP8 try layers on numbers
            head = _swap_kernels(module, job["kernels"][structure.kernels], graphs is not None, undo)
            plugin = _precision(job["precision"][structure.precision])
            if hasattr(plugin, "recipe"):
                _convert(module, plugin, structure.shard, emulate=graphs is None and device.type == "cpu")
                undo.callback(restore, module)
        compiles, every = cfg.strategy.get("compile", "auto"), cfg.strategy.get("checkpoint_every", 2)
        recomputation = structure.activation_checkpointing
        if graphs is not None and compiles is not False:
            _fuse(blocks, graphs, recomputation, every)
            recomputation = "none"
        settings = Settings(
            cfg.strategy.get("blocks"), False if graphs is not None else compiles,
            activation_checkpointing=recomputation, checkpoint_every=every,
            reshard_after_forward=structure.reshard_after_forward, activation_offload=structure.activation_offload,
            prefetch=cfg.strategy.get("prefetch", 1),
        )  # fmt: skip
        groups, _ = shard.choose_groups(module, blocks)
        largest = sorted(_group_bytes(module, list(groups.values())), reverse=True)[:2]
        placed = place(
            module, settings, mesh, device, 0, policy.fsdp_policy(plugin), policy.computes_in_bf16(plugin) and mesh is None
        )  # fmt: skip
        undo.callback(placed.undo)
        subject = _subject(module, blocks, placed, plugin, cfg, device, graphs is not None)
        for optimizer in subject.optimizers:
            undo.callback(one_pass_optimizer.restore, optimizer)
        return Assembled(subject, head, largest, undo.pop_all().close)


def _fuse(blocks: Mapping[str, nn.Module], graphs: Graphs, recomputation: str, every: int) -> None:
    """In the place of compilation, with recomputation inside of the compiled graph or around it as in `place`."""
    inside = {name for name, block in blocks.items() if not activation.kept_by_the_compiler(block)}
    graphs.fuse(blocks, inside & set(activation.chosen_blocks(list(blocks), recomputation, every)))
    apart = [block for name, block in blocks.items() if name not in inside]
    activation.checkpoint_blocks(blocks, recomputation, every, where=lambda block: block in apart)


def _subject(
    module: Any, blocks: Mapping[str, nn.Module], placed: Placed, plugin: Precision, cfg: Any, device: torch.device, fake: bool
) -> Subject:  # fmt: skip
    masters = placed.masters
    optimizers = _optimizers(module.configure_optimizers())
    wanted = cfg.strategy.get("one_pass_optimizer", "auto")
    anywhere = True if fake and wanted == "auto" else wanted
    surroundings.use_one_pass(optimizers, anywhere, device, masters)
    surroundings._choose_gradients(optimizers, masters, private=True)
    if fake:
        use_gpu_defaults(optimizer for optimizer in optimizers if one_pass_optimizer.one_pass(optimizer) is None)
    kind = fake_tensors.FakeFusedWeights if fake else FusedWeights
    weights = kind(module) if getattr(plugin, "recipe", None) == FUSED and masters is not None else None

    @contextmanager
    def computing() -> Iterator[None]:
        with (
            masters.active() if masters is not None else nullcontext(),
            weights.active() if weights is not None else nullcontext(),
        ):
            yield

    with computing():
        pass  # makes the FP8 weights, which live from then on

    def hold(whole: bool) -> None:
        for group in shard.fsdp_modules(module):
            group.set_requires_gradient_sync(not whole, recurse=False)

    def before_step() -> None:
        shard.reshard(module)
        if masters is not None and not all(map(surroundings.keeps_copies_fresh, optimizers)):
            masters.invalidate()

    held = [] if masters is None else list(masters.copies.values())
    held += [] if weights is None else [tensor for group in weights._held for weight in group for tensor in weight]
    batch = partial(_batch, module, plugin, seq_len=cfg.data.seq_len, device=device)
    return Subject(
        module=module,
        blocks=blocks,
        training_step=lambda rows: _loss(module.training_step(batch(rows), 0)),
        optimizers=optimizers,
        computing=computing,
        hold_gradients=hold,
        before_step=before_step,
        long_lived=held,
    )


def _batch(module: Any, plugin: Precision, rows: int, seq_len: int, device: torch.device) -> Any:
    """What the module says it takes, else a batch of text as the suite's loader makes it."""
    if hasattr(module, "example_batch"):
        batch = tree_map_only(Tensor, lambda t: t.to(device), module.example_batch(rows))
        return policy.cast_batch(plugin, batch)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    batch = {name: torch.zeros(rows, seq_len, dtype=torch.int64, device=device) for name in names}
    return {**batch, "row_valid": torch.ones(rows, dtype=torch.bool, device=device)}


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


def _swap_kernels(module: nn.Module, config: Mapping[str, Any], fake: bool, undo: ExitStack) -> list[int] | None:
    """Swap as on a GPU; the shape [V, D] of an output head whose logits are deferred."""
    if "_target_" not in config:
        return None
    as_on_a_gpu = {"backend": "reference", "rms_norm": False, "verify": False} if fake else {}
    callback = app.plugin(OmegaConf.create({**config, **as_on_a_gpu}))
    callback.transform_module(module)
    undo.callback(callback.restore)
    heads = [m for m in module.modules() if isinstance(m, nn.Linear) and swap.is_swapped(m)]
    return list(heads[0].weight.shape) if heads else None


def _precision(config: Mapping[str, Any]) -> Precision:
    if "_target_" in config:
        return app.plugin(OmegaConf.create(dict(config)))
    plugins = {"bf16-mixed": policy.BF16Mixed, "32-true": Precision}
    if config["name"] not in plugins:
        raise ValueError(f"precision.name={config['name']}: can be planned for {', '.join(plugins)} and FP8Precision")
    return plugins[config["name"]]()


def _convert(module: nn.Module, plugin: Any, shards: int, emulate: bool) -> None:
    """To FP8, as the plugin does behind its checks of the device."""
    decisions = decide(module, plugin.recipe, head=plugin.head, keep_small=plugin.keep_small, skip=plugin.skip)
    Recipe(plugin.recipe, emulate, all_gather=plugin.all_gather).convert(module, decisions, shards)


def _group_bytes(module: nn.Module, groups: Sequence[nn.Module]) -> list[int]:
    sizes = [{p: p.numel() * p.element_size() for p in group.parameters()} for group in groups]
    inside = {p for size in sizes for p in size}
    root = {p: p.numel() * p.element_size() for p in module.parameters() if p not in inside}
    return [sum(size.values()) for size in [*sizes, root]]
