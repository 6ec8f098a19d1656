"""What to type when a run is out of memory: the ways out in the order of what they cost, each with the value that comes next.

The same settings are what the planner varies (`planner/space.py`), and `fms-plan` says before a run which of them fit. Here nothing
is predicted: a run has failed, and the next try should take a minute to type. First what changes no number of the training and
little of its speed, then what computes again, then what moves tensors to the host.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_fms.launch.words import flags_in, key_of, overrides_in

SHOWN = 3
_ON_A_HOST = ("can't allocate memory", "Unable to allocate")
_LARGE_VOCABULARY = 8192


def cause_of(error: BaseException | None) -> BaseException | None:
    """What says that memory was short, in an error or what it came from; `None` where nothing does."""
    while error is not None:
        host = isinstance(error, RuntimeError | MemoryError) and any(text in str(error) for text in _ON_A_HOST)
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or host:
            return error
        error = error.__cause__
    return None


def ways_out(config: Mapping[str, Any], devices: int, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Overrides with what they do, cheapest first.

    Args:
        config: the plain, resolved config of the run.
        devices: ranks of the run.
        on_gpu: whether they are GPUs.
    """
    data, strategy = config["data"], config["strategy"]
    rows, vocabulary = _rows(data, devices), ((config["model"].get("net") or {}).get("vocab_size")) or 0
    if rows > 1:
        yield f"data.micro_batch_size={rows // 2}", "the same batches in more parts"
    if (
        on_gpu
        and "_target_" not in config["kernels"]
        and isinstance(vocabulary, int)
        and vocabulary >= _LARGE_VOCABULARY
    ):
        yield "kernels=all", "never stores the logits"
    ours = str(strategy.get("_target_", "")).endswith("FSDPCompileStrategy")
    if not ours:
        yield "strategy=fsdp_compile", "shards weights and optimizer over the ranks"
    if ours and devices > 1 and strategy.get("replicate", 1) not in (1, "1"):
        yield "strategy.replicate=1 strategy.shard=auto", "shards over all ranks"
    if ours and strategy.get("activation_checkpointing") in ("none", "selective"):
        again = "full" if strategy["activation_checkpointing"] == "selective" or not on_gpu else "selective"
        yield f"strategy.activation_checkpointing={again}", "computes activations again in backward"
    if ours and on_gpu and not strategy.get("activation_offload"):
        yield "strategy.activation_offload=true", "keeps activations in host memory"
    if ours and on_gpu and int((config.get("trainer") or {}).get("num_nodes") or 1) == 1:
        yield f"trainer.devices={2 * devices}", "halves what a device holds of weights and optimizer"
    if ours and on_gpu and not strategy.get("cpu_offload"):
        yield "strategy.cpu_offload=true", "keeps weights and optimizer in host memory; slow"
    if (length := data.get("seq_len")) and length > 1:
        yield f"data.seq_len={length // 2}", "shorter rows: another training"


def _rows(data: Mapping[str, Any], devices: int) -> int:
    """Rows that a rank has on its device at once, as far as the config says."""
    total, micro = data.get("global_batch_size"), data.get("micro_batch_size")
    of_rank = -(-total // devices) if isinstance(total, int) else 1
    return min(of_rank, micro) if isinstance(micro, int) else of_rank


def explained(error: BaseException, config: Mapping[str, Any], devices: int, on_gpu: bool, overrides: list[str]) -> str:
    """The error's first line, three ways out, and the command that says what fits.

    Args:
        error: that memory was short.
        config: the plain, resolved config of the run.
        devices: ranks of the run.
        on_gpu: whether they are GPUs.
        overrides: the command line of the run.
    """
    said = next(iter(str(error).splitlines()), "") or "out of memory"
    ways = list(ways_out(config, devices, on_gpu))[:SHOWN]
    width = max(len(way) for way, _ in ways) if ways else 0
    lines = [f"out of memory: {said}", "  Add one of these to the command, cheapest first:"]
    lines += [f"    {way:<{width}}    # {what}" for way, what in ways]
    planned = [
        word for word in overrides_in(overrides) if key_of(word) not in ("resume", "paths.run", "trainer.accelerator")
    ]
    if on_gpu:
        lines.append(f"  What fits, and how fast: fms-plan {' '.join([*flags_in(overrides), *planned])}")
    return "\n".join(lines)


class OutOfMemory(RuntimeError):
    """A run that had not enough memory, with what to do about it."""
