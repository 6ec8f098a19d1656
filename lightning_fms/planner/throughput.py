"""How long a step takes, from what it has to compute and to move.

Two numbers come from the same counts. The **bound** is what no implementation beats: FLOPs at the peak, bytes at the
memory's rate, bytes over the links, whichever is longest. The **estimate** adds what the step does one after the other, at
the shares of the peaks that training reaches:

    matrix products / (peak * efficiency)  +  bytes / (bandwidth * 0.7)  +  transfers that computing does not hide

What is counted (bytes per parameter of the rank, unless said):

- FLOPs: of forward and backward (3 forwards), and forwards that are computed again; fp32 at TF32's rate;
- optimizer 28 (AdamW on fp32: read weight, gradient, two moments, write three), gradient norm and clipping 12, and on one
  device 12 for bf16 copies and gradients cast back;
- activations: three times what the backward keeps; logits: 30 bytes a logit, 6 where the loss is fused;
- FP8: 15 bytes a converted weight and micro-batch, and 7 times the activations, for scales and casts (fitted, see below);
- all-gathers in bf16, reduce-scatter in fp32, over the links; 80 % of computing hides them (FSDP prefetches);
- offload: shards to the GPU for each gather, gradients back, and AdamW at the host's rate of memory.

On the H200 the estimate is within 8 % of the eight measured steps of docs/performance.md, on which its constants were fitted. For
everything else it is a guess with the interval `INTERVAL`: measure where there is a GPU.
"""

from dataclasses import dataclass

from lightning_fms.planner.hardware import Hardware
from lightning_fms.planner.space import Configuration

INTERVAL = (0.8, 1.35)  # of the estimate
BANDWIDTH_EFFICIENCY = 0.7
LINK_EFFICIENCY = 0.7
HIDDEN = 0.8  # share of computing time behind which transfers hide
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
    """

    parameters: float
    block_weights: float
    flops_per_token: float
    block_flops_per_token: float
    seq_len: int
    vocab_size: int
    activation_bytes: float


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
    if configuration.precision == "fp8":
        if hardware.fp8_tflops is None:
            raise ValueError(f"precision=fp8: {hardware.name} has no FP8")
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
    parts = {
        "compute": compute,
        "memory": memory / BANDWIDTH_EFFICIENCY,
        "links": max(0.0, links / LINK_EFFICIENCY - HIDDEN * spent),
        "host": host,
    }
    estimate = sum(parts.values())
    model_flops = tokens * work.flops_per_token
    return StepTime(
        max(at_peak, memory, links, host), estimate, model_flops / estimate / (hardware.bf16_tflops * 1e12), parts
    )


def _bytes(work: Work, configuration: Configuration, tokens: int) -> float:
    own = work.parameters / configuration.shard
    optimizer = 0.0 if configuration.cpu_offload else own * (28 + 12)
    copies = work.parameters * 12 if configuration.devices == 1 and configuration.precision != "fp32" else 0.0
    activations = work.activation_bytes * tokens / work.seq_len
    logits = tokens * work.vocab_size * (6 if configuration.kernels != "none" else 30)
    casts = 0.0
    if configuration.precision == "fp8":
        casts = 15 * work.block_weights * configuration.micro_batches + 7 * activations
    return optimizer + copies + 3 * activations + logits + casts


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
