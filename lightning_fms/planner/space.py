"""Which configurations there are to choose from, at a constant number of tokens a step.

A configuration says how one optimizer step of the same model on the same rows is computed; the loss curve does not depend
on it (but for rounding). So configurations differ in memory and time only, and the planner may choose freely.

'$100K or 100 Days' (arXiv:2410.23261) searches activation checkpointing {off, on} x {no sharding, ZeRO-1, ZeRO-2, ZeRO-3,
FSDP grad-op, FSDP full} x offload {off, on}, without offload where nothing is sharded: 22 on several GPUs. On one GPU
sharding without offload is nothing, which leaves 12. It doubles the micro-batch until memory ends. `published_space` lists
these and `ours` maps each to the suite's terms:

| theirs | `shard` | `reshard_after_forward` | `accumulate_without_reduce` |
|---|---|---|---|
| none | 1 (`replicate` = devices) | - | - |
| ZeRO-1: whole gradients until the step | all | false | true |
| ZeRO-2, FSDP grad-op: gradients sharded at once | all | false | false |
| ZeRO-3, FSDP full: parameters gathered twice | all | true | false |

What differs: `fully_shard` always shards what lies between steps (parameters, gradients, optimizer state), so ours holds
less than ZeRO-1 and ZeRO-2 where parameters stay whole, and gathers once more per micro-batch. Offload moves all shards;
ZeRO-1 and ZeRO-2 move the optimizer only. Compile and TF32 are always on there, and here on GPUs; their kernels are ours
at `kernels=none`, where attention is fused already.

`enumerate_space` is a superset of the image: selective checkpointing, both ways to accumulate, HSDP over nodes, FP8,
kernels, and every micro-batch that changes the number of micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

CHECKPOINTING = ("none", "selective", "full")
FP8_RECIPES = ("fp8", "tensorwise", "rowwise", "rowwise_gw_hp", "fused")  # `fp8` is the option's own recipe
SHARDINGS = ("none", "zero_1", "zero_2", "zero_3", "fsdp_grad_op", "fsdp_full")


@dataclass(frozen=True)
class Configuration:
    """How a step is computed, in the terms of `conf/`.

    Attributes:
        replicate: groups that hold a copy of the model each.
        shard: ranks that share a copy; `replicate * shard` is the number of devices.
        activation_checkpointing: `none`, `selective` or `full`.
        reshard_after_forward: gather parameters again in backward.
        accumulate_without_reduce: hold whole gradients until the last micro-batch.
        cpu_offload: shards and optimizer in the host's memory.
        activation_offload: what blocks keep for their backward in the host's memory.
        precision: an option of the group `precision`, or a recipe of its option `fp8`.
        kernels: an option of the group `kernels`.
        micro_batch_size: rows that a device computes at once.
        micro_batches: how often, per optimizer step.
    """

    replicate: int = 1
    shard: int = 1
    activation_checkpointing: str = "none"
    reshard_after_forward: bool = True
    accumulate_without_reduce: bool = True
    cpu_offload: bool = False
    precision: str = "bf16"
    kernels: str = "none"
    micro_batch_size: int = 1
    micro_batches: int = 1
    activation_offload: bool = False

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard

    @property
    def sharding(self) -> str:
        """The layout in a word, as reports show it."""
        if self.devices == 1:
            return "one device"
        if self.shard == 1:
            return f"{self.replicate} copies"
        kind = "shard" if self.reshard_after_forward else "shard, keep"
        return kind if self.replicate == 1 else f"{self.replicate} x {kind}"

    def overrides(self) -> list[str]:
        """What to give `fms-train` for it."""
        flags = ("reshard_after_forward", "accumulate_without_reduce", "cpu_offload", "activation_offload")
        return [
            f"strategy.replicate={self.replicate}",
            f"strategy.shard={self.shard}",
            f"strategy.activation_checkpointing={self.activation_checkpointing}",
            *(f"strategy.{flag}={str(getattr(self, flag)).lower()}" for flag in flags),
            *precision_overrides(self.precision),
            f"kernels={self.kernels}",
            f"data.micro_batch_size={self.micro_batch_size}",
        ]


def precision_overrides(precision: str) -> list[str]:
    """What to give `fms-train` for an option of `precision`, or for a recipe of `fp8`."""
    if precision in FP8_RECIPES and precision != "fp8":
        return ["precision=fp8", f"precision.recipe={precision}"]
    return [f"precision={precision}"]


@dataclass(frozen=True)
class Published:
    """A combination of '$100K or 100 Days'."""

    activation_checkpointing: bool
    sharding: str
    offloading: bool


def published_space(devices: int) -> list[Published]:
    """Their combinations: 22, or 12 for one device."""
    every = (Published(*choice) for choice in product((False, True), SHARDINGS, (False, True)))
    return [
        choice
        for choice in every
        if not (choice.offloading and choice.sharding == "none")
        and not (devices == 1 and choice.sharding != "none" and not choice.offloading)
    ]


def ours(choice: Published, devices: int, micro_batches: int = 1) -> Configuration:
    """The configuration that does the same, at one row a micro-batch."""
    common = {
        "micro_batches": micro_batches,
        "activation_checkpointing": "full" if choice.activation_checkpointing else "none",
        "cpu_offload": choice.offloading,
    }
    if choice.sharding == "none":
        return normal(Configuration(replicate=devices, **common))  # type: ignore[arg-type]
    return normal(
        Configuration(
            shard=devices,
            reshard_after_forward=choice.sharding in ("zero_3", "fsdp_full"),
            accumulate_without_reduce=choice.sharding == "zero_1",
            **common,  # type: ignore[arg-type]
        )
    )


def normal(configuration: Configuration) -> Configuration:
    """The same configuration with defaults where a setting changes nothing, so that equals compare equal."""
    unsharded = configuration.shard == 1
    alone = configuration.devices == 1
    return replace(
        configuration,
        reshard_after_forward=True if unsharded else configuration.reshard_after_forward,
        accumulate_without_reduce=(
            True if alone or configuration.micro_batches == 1 else configuration.accumulate_without_reduce
        ),
    )


def micro_batch_sizes(rows: int) -> list[int]:
    """Micro-batches worth trying for `rows` rows of a device, largest first.

    For each number of micro-batches A the smallest size that does it, ceil(rows / A). Any other size pads more rows for
    the same A, so a power of two that is left out is never better than its neighbour in the list.
    """
    if rows < 1:
        raise ValueError(f"{rows=}: a device needs at least one row a step; give fewer devices or a larger batch")
    return sorted({-(-rows // a) for a in range(1, rows + 1)}, reverse=True)


def rows_per_device(global_batch_size: int, devices: int) -> int:
    """Rows of the fullest device.

    Raises:
        ValueError: fewer rows than devices.
    """
    if global_batch_size < devices:
        raise ValueError(
            f"data.global_batch_size={global_batch_size}: fewer rows than {devices} devices; "
            f"give at least {devices}, or fewer devices"
        )
    return -(-global_batch_size // devices)


def enumerate_space(
    devices: int,
    global_batch_size: int,
    nodes: int = 1,
    checkpointing: Sequence[str] = CHECKPOINTING,
    offload: Sequence[bool] = (False, True),
    precisions: Sequence[str] = ("bf16",),
    kernels: Sequence[str] = ("none", "all"),
    largest_micro_batch: int | None = None,
    activation_offload: Sequence[bool] = (False,),
) -> list[Configuration]:
    """Every configuration for `devices` devices, each once.

    Args:
        devices: in all nodes.
        global_batch_size: rows of an optimizer step; the same in every configuration.
        nodes: with more than one, a copy of the model in each node (HSDP) is tried as well.
        checkpointing: modes to try.
        offload: whether to try the host's memory.
        precisions: options of `precision`.
        kernels: options of `kernels`.
        largest_micro_batch: leave out larger ones.
        activation_offload: whether to try the host's memory for activations.

    Raises:
        ValueError: numbers that do not fit each other.
    """
    if devices % nodes:
        raise ValueError(f"{devices=} over {nodes=}: give a multiple")
    rows = rows_per_device(global_batch_size, devices)
    sizes = [size for size in micro_batch_sizes(rows) if largest_micro_batch is None or size <= largest_micro_batch]
    found: dict[Configuration, None] = {}
    for size, layout in product(sizes, _layouts(devices, nodes)):
        for mode, moved, pages, precision, kernel in product(
            checkpointing, offload, activation_offload, precisions, kernels
        ):
            if moved and layout.shard == 1 and layout.devices > 1:
                continue
            candidate = replace(
                layout,
                activation_checkpointing=mode,
                cpu_offload=moved,
                activation_offload=pages,
                precision=precision,
                kernels=kernel,
                micro_batch_size=size,
                micro_batches=-(-rows // size),
            )
            found[normal(candidate)] = None
    return list(found)


def _layouts(devices: int, nodes: int) -> Iterator[Configuration]:
    yield Configuration(replicate=devices, shard=1)
    groups = {1, nodes} if devices > 1 else set()
    for replicate in sorted(groups):
        if devices // replicate > 1:
            for keep, hold in product((True, False), (True, False)):
                yield Configuration(replicate, devices // replicate, "none", not keep, hold)
