"""How long a step takes, from what it has to compute and to move.

Two numbers come from the same counts. The **bound** is what no implementation beats: FLOPs at the peak, bytes at the
memory's rate, bytes over the links, whichever is longest. The **estimate** adds what the step does one after the other, at
the shares of the peaks that training reaches:

    matrix products / (peak * efficiency)  +  bytes / (bandwidth * 0.7)  +  transfers that computing does not hide

What is counted (bytes per parameter of the rank, unless said):

- FLOPs: of forward and backward (3 forwards), and forwards that are computed again; fp32 at TF32's rate;
- optimizer in one pass: 30 on one device (weight and two moments read and written in fp32, gradient read twice and copy written
  in bf16), 32 where gradients are reduced in fp32; 52 by PyTorch (clipping, casts and copies apart);
- activations: 3.5 times what the backward keeps; logits: 36 bytes a logit, 6 where the loss is fused;
- FP8, for scales and casts: `fused` 3 times the activations and 6 bytes a converted weight and step, 8 a micro-batch where weights
  are gathered; torchao's 7 times the activations and 15 bytes a weight and micro-batch;
- all-gathers in bf16, reduce-scatter in fp32, over the links; 80 % of computing hides them (FSDP prefetches);
- offload: shards to the GPU for each gather, gradients back, and AdamW at the host's rate of memory;
- activation offload: what blocks keep, to the host and back, beside the computing.

The factors are fitted to the steps of docs/performance.md (H200; bf16 and `fused`, two shapes, recomputation, offloaded
activations), within 5 %; torchao's to an earlier state of the suite. For everything else the estimate is a guess with the interval
`INTERVAL`: measure where there is a GPU.
"""

from dataclasses import dataclass

from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.space import FP8_RECIPES, Configuration

INTERVAL = (0.8, 1.35)  # of the estimate
BANDWIDTH_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.7
HIDDEN = 0.8  # share of computing time behind which transfers hide
MOVED = 0.87  # share of the activations that offload moves; the last block's and small tensors stay
HOST_ADAM_GBPS = 20.0  # memory of the host that one rank's optimizer gets, GB/s
IMPLAUSIBLE_MFU = 0.75
DAY = 86_400.0


@dataclass(frozen=True)
class Work:
    """What a model costs, independent of how it is distributed.

    Attributes:
        parameters: trained ones.
        block_weights: those of linear layers in repeated blocks.
        flops_per_token: forward and backward.
        block_flops_per_token: the part of repeated blocks.
        seq_len: tokens of a row.
        vocab_size: logits of a token.
        activation_bytes: per row, kept for the backward without recomputation.
        one_pass: whether the optimizer steps in one pass.
    """

    parameters: float
    block_weights: float
    flops_per_token: float
    block_flops_per_token: float
    seq_len: int
    vocab_size: int
    activation_bytes: float
    one_pass: bool = True


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        bound: no step is shorter.
        estimate: what to expect.
        mfu: model FLOPs (recomputation not counted) of the estimate, as a share of the bf16 peak.
        parts: of the estimate, by name.
    """

    bound: float
    estimate: float
    mfu: float
    parts: dict[str, float]

    @property
    def interval(self) -> tuple[float, float]:
        """Shortest and longest that is likely."""
        return max(self.bound, self.estimate * INTERVAL[0]), self.estimate * INTERVAL[1]


def recomputed_share(configuration: Configuration, every: int = 2) -> float:
    """Share of the blocks whose forward runs twice."""
    return {"none": 0.0, "selective": 1 / every, "full": 1.0}[configuration.activation_checkpointing]


def step_time(work: Work, configuration: Configuration, hardware: Hardware, every: int = 2) -> StepTime:
    """Bound and estimate of a step on one rank; ranks do equal work.

    Raises:
        ValueError: FP8 on hardware without it.
    """
    tokens = configuration.micro_batch_size * configuration.micro_batches * work.seq_len
    again = recomputed_share(configuration, every) * work.block_flops_per_token / 3
    flops = {"bf16": tokens * (work.flops_per_token + again), "fp8": 0.0}
    if configuration.precision in FP8_RECIPES:
        if hardware.fp8_tflops is None:
            raise ValueError(f"precision={configuration.precision}: {hardware.name} has no FP8")
        converted = tokens * 6 * work.block_weights * (1 + recomputed_share(configuration, every) / 3)
        flops = {"bf16": flops["bf16"] - converted, "fp8": converted}
    at_peak = flops["bf16"] / (hardware.bf16_tflops * 1e12)
    if configuration.precision == "fp32":
        at_peak *= 2  # TF32, half of bf16's rate
    if hardware.fp8_tflops is not None:
        at_peak += flops["fp8"] / (hardware.fp8_tflops * 1e12)
    compute = at_peak / hardware.matmul_efficiency
    moved = _bytes(work, configuration, tokens)
    memory = moved / (hardware.bandwidth_gbps * 1e9)
    links = _links(work, configuration, hardware)
    host = _host(work, configuration, hardware)
    spent = compute + memory / BANDWIDTH_EFFICIENCY
    pages = _pages(work, configuration, hardware, every)
    parts = {
        "compute": compute,
        "memory": memory / BANDWIDTH_EFFICIENCY,
        "links": max(0.0, links / LINK_EFFICIENCY - HIDDEN * spent),
        "host": host + max(0.0, pages - spent),
    }
    estimate = sum(parts.values())
    model_flops = tokens * work.flops_per_token
    return StepTime(
        max(at_peak, memory, links, host, pages),
        estimate,
        model_flops / estimate / (hardware.bf16_tflops * 1e12),
        parts,
    )


def _bytes(work: Work, configuration: Configuration, tokens: int) -> float:
    own = work.parameters / configuration.shard
    alone = configuration.shard == 1 and configuration.devices == 1
    step = (30 if alone else 32) if work.one_pass else (52 if alone and configuration.precision != "fp32" else 40)
    optimizer = 0.0 if configuration.cpu_offload else own * step
    activations = work.activation_bytes * tokens / work.seq_len
    logits = tokens * work.vocab_size * (6 if configuration.kernels != "none" else 36)
    return optimizer + 3.5 * activations + logits + _casts(work, configuration, activations, alone)


def _casts(work: Work, configuration: Configuration, activations: float, alone: bool) -> float:
    if configuration.precision not in FP8_RECIPES:
        return 0.0
    if configuration.precision == "fused":
        return work.block_weights * (6 if alone else 8 * configuration.micro_batches) + 3 * activations
    return work.block_weights * 15 * configuration.micro_batches + 7 * activations


def _pages(work: Work, configuration: Configuration, hardware: Hardware, every: int) -> float:
    """Seconds in which activations go to the host and back; at full recomputation next to nothing does."""
    if not configuration.activation_offload:
        return 0.0
    rows = configuration.micro_batch_size * configuration.micro_batches
    kept = MOVED * work.activation_bytes * rows * (1 - recomputed_share(configuration, every))
    return 2 * kept / (hardware.host_gbps * 1e9)


def _links(work: Work, configuration: Configuration, hardware: Hardware) -> float:
    """Seconds on the links at their full rate."""
    shard, replicate = configuration.shard, configuration.replicate
    reductions = 1 if configuration.accumulate_without_reduce else configuration.micro_batches
    gathers = configuration.micro_batches * (2 if configuration.reshard_after_forward else 1)
    seconds = 0.0
    if shard > 1:
        moved = work.parameters * (2 * gathers + 4 * reductions) * (shard - 1) / shard
        seconds += moved / (hardware.link(shard) * 1e9)
    if replicate > 1:
        moved = work.parameters / shard * 4 * 2 * reductions * (replicate - 1) / replicate
        seconds += moved / (hardware.link(configuration.devices) * 1e9)
    return seconds


def _host(work: Work, configuration: Configuration, hardware: Hardware) -> float:
    if not configuration.cpu_offload:
        return 0.0
    own = work.parameters / configuration.shard
    gathers = configuration.micro_batches * (2 if configuration.reshard_after_forward else 1)
    reductions = 1 if configuration.accumulate_without_reduce else configuration.micro_batches
    return own * 4 * (gathers + reductions) / (hardware.host_gbps * 1e9) + own * 28 / (HOST_ADAM_GBPS * 1e9)
