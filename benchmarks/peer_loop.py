"""One variant of the peer for `gpu.py`: the loop that a good engineer writes by hand, with none of our plugins.

The same model class, initial weights, batches, optimizer, clipping and learning rate as ours, so the losses compare. The
precision is autocast over fp32 weights, or `fully_shard` on one rank. To the peer's advantage, all batches are on the
device before the first step: loading and tokenizing is in our time and not in its.
"""

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step_meter import StepMeter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from workload import (
    CLIP_NORM,
    PEER_OPTIONS,
    SEED,
    SHAPES,
    Shape,
    adamw,
    loader_arguments,
    measure_parser,
    settle,
    warm_up,
)

from lightning_fms.callbacks.flops import count_train_flops
from lightning_fms.data.loader import StreamLoader
from lightning_fms.distributed.materialize import Materializer
from lightning_fms.models.llama import Llama

Loss = Callable[[Tensor, Tensor], Tensor]


class LigerRMSNorm(nn.Module):
    """Liger's kernel with the weight of the norm that it replaces."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: PLC0415 (optional)

        self.weight, self.eps, self._apply_kernel = norm.weight, norm.eps, LigerRMSNormFunction.apply

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self._apply_kernel(x_BTD, self.weight, self.eps, 0.0, "llama", False)


def prepare(net: Llama, options: set[str], device: torch.device) -> None:
    """Norms, FP8, compilation and sharding, in the order in which they compose."""
    if "lrms" in options:
        for block in net.layers:
            block.attention_norm, block.ffn_norm = LigerRMSNorm(block.attention_norm), LigerRMSNorm(block.ffn_norm)
        net.norm = LigerRMSNorm(net.norm)
    if options & {"fp8", "rowwise"}:
        recipe = "rowwise" if "rowwise" in options else "tensorwise"
        _convert_to_fp8(net, recipe, emulate=device.type == "cpu", gather="gather" in options)
    if "stream" in options:
        net.embedding.register_forward_hook(lambda module, inputs, x_BTD: x_BTD.bfloat16())
    if "compile" in options:
        for block in net.layers:
            block.compile()
        net.norm.compile()
    if "fsdp" in options:
        _shard(net, device)


def _convert_to_fp8(net: Llama, recipe: str, emulate: bool, gather: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 (slow to import)

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=gather)
    convert_to_float8_training(net, config=config, module_filter_fn=lambda layer, name: name != "head")


def _precompute_scales(net: Llama) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp  # noqa: PLC0415 (slow to import)

    precompute_float8_dynamic_scale_for_fsdp(net)


def _shard(net: Llama, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def make_loss(net: Llama, options: set[str]) -> Loss:
    """(input ids [B, T], labels [B, T]) -> mean loss."""
    if "lce" in options:
        from liger_kernel.transformers.fused_linear_cross_entropy import (  # noqa: PLC0415 (optional)
            LigerFusedLinearCrossEntropyLoss,
        )

        fused, head, net.head = LigerFusedLinearCrossEntropyLoss(), net.head, nn.Identity()
        return lambda ids, labels: fused(head.weight, net(ids).flatten(0, 1), labels.flatten())

    def cross_entropy(logits_BTV: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten())

    of_logits = torch.compile(cross_entropy) if "compile" in options else cross_entropy
    return lambda ids, labels: of_logits(net(ids), labels)


def make_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    """AdamW in which only matrices decay."""
    vectors = [p for p in parameters if p.ndim < 2]
    return adamw([{"params": [p for p in parameters if p.ndim >= 2]}, {"params": vectors, "weight_decay": 0.0}])


def batches(shape: Shape, tokenizer: str, steps: int, device: torch.device) -> list[dict[str, Tensor]]:
    """What our run streams to this rank, on the device in advance."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loader = StreamLoader(**loader_arguments(shape, tokenizer, readers=world), rank=rank, world_size=world)
    return [
        {name: batch[name].to(device) for name in ("input_ids", "labels")} for batch in itertools.islice(loader, steps)
    ]


def _join(device: torch.device) -> None:
    """Join the ranks that torchrun started, or be the only one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and return its row."""
    shape, options, device = SHAPES[arguments.shape], set(arguments.options.split("+")), torch.device(arguments.device)
    assert options <= PEER_OPTIONS.keys()
    settle(device)
    if "fsdp" in options:
        _join(device)
    net = shape.model()
    flops = count_train_flops(net).at(shape.seq_len)
    # A module's initial weights depend on its name, and in ours the model is `net` of the LightningModule.
    Materializer(device, SEED).fill(nn.ModuleDict({"net": net}).named_modules())
    prepare(net, options, device)
    parameters = list(net.parameters())
    loss_of = make_loss(net, options)
    optimizer = make_optimizer(parameters)
    schedule = warm_up(optimizer)
    data = batches(shape, arguments.tokenizer, arguments.steps + arguments.profile, device)
    meter = StepMeter(device, arguments.warmup, arguments.steps, arguments.profile)
    attention: AbstractContextManager = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if "cudnn" in options else nullcontext()
    with attention:
        meter.start()
        for batch in data:
            with torch.autocast(device.type, torch.bfloat16, enabled="fsdp" not in options):
                loss = loss_of(batch["input_ids"], batch["labels"])
            meter.phase("forward")
            loss.backward()
            meter.phase("backward")
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
            optimizer.step()
            if "gather" in options:
                _precompute_scales(net)
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            meter.step_done(loss.detach(), parameters, optimizer)
    if "fsdp" in options:
        dist.destroy_process_group()
    return {**meter.row(shape.rows * shape.seq_len, flops), "report": []}


if __name__ == "__main__":
    given = measure_parser(__doc__).parse_args()
    row = measure(given)
    if os.environ.get("RANK", "0") == "0":
        given.row.write_text(json.dumps(row))
