"""One variant of ours for `gpu.py`: a plain CausalLM through the real Trainer, its data streamed meanwhile."""

import argparse
import json
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from step_meter import StepMeter
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import CLIP_NORM, ONLY_TRAIN, OPTIONS, SHAPES, adamw, loader_arguments, measure_parser, settle, warm_up

from lightning_fms.callbacks.flops import count_train_flops
from lightning_fms.data import RescalableDataModule
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.kernels import TritonKernels
from lightning_fms.models import CausalLM
from lightning_fms.precision import FP8Precision

SWAPS = ("rms_norm", "gated_product", "rotary")
RECIPES = {"fp8": "tensorwise", "fused": "fused", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_gw_hp"}


class Metered(L.Callback):
    """Reads the meter at the points of the Trainer's step."""

    only_watches = True  # the strategy keeps its gradients in bf16, see `surroundings`

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.meter.start()

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: torch.Tensor) -> None:
        self.meter.phase("forward")

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.meter.phase("backward")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.meter.step_done(outputs["loss"], module.parameters(), trainer.optimizers[0])


class Sharded(FSDPCompileStrategy):
    """Wraps on one device, too: what sharding costs apart from the communication."""

    _wraps = True  # type: ignore[assignment]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and return its row."""
    shape, options, device = SHAPES[arguments.shape], set(arguments.options.split("+")), torch.device(arguments.device)
    assert options <= OPTIONS.keys()
    L.seed_everything(arguments.seed, verbose=False)
    settle(device)
    module = CausalLM(shape.model(), adamw, warm_up)
    flops = count_train_flops(module.net).at(shape.seq_len)
    meter = StepMeter(device, arguments.warmup, arguments.steps, arguments.profile)
    swaps: dict[str, Any] = {swap: True for swap in SWAPS if swap in options}
    kernels = TritonKernels(backend="auto" if device.type == "cuda" else "reference", **swaps)
    tensor = 2 if "tensor" in options else 1
    kind = Sharded if "fsdp" in options else FSDPCompileStrategy
    strategy = kind(replicate=2 if "hsdp" in options else 1, tensor=tensor, reshard_after_forward="kept" not in options)
    fp8 = _fp8(options, device)
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=arguments.devices,
        max_steps=arguments.steps + arguments.profile,
        strategy=strategy,
        callbacks=[Metered(meter), *([kernels] if "kernels" in options else [])],
        gradient_clip_val=CLIP_NORM,
        **ONLY_TRAIN,
        **({"plugins": [fp8]} if fp8 else {"precision": "bf16-mixed"}),
    )
    workers = 2 if device.type == "cuda" else 0
    text = loader_arguments(shape, arguments.tokenizer, arguments.seed, arguments.devices // tensor)
    data = RescalableDataModule(**text, num_workers=workers)
    attention: AbstractContextManager = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if "cudnn" in options else nullcontext()
    with attention:
        trainer.fit(module, datamodule=data)
    report = [*strategy.report.lines(), *(fp8.report if fp8 else [])]
    report += kernels.report if "kernels" in options else []
    return {**meter.row(shape.rows * shape.seq_len, flops), "report": report}


def _fp8(options: set[str], device: torch.device) -> FP8Precision | None:
    recipes = [recipe for option, recipe in RECIPES.items() if option in options]
    if not recipes:
        return None
    on_cpu = device.type == "cpu"  # there it proves that the run works, on layers that are all too small to gain
    gather = "gather" in options
    small = on_cpu or "small" in options
    exact = "exact" in options
    return FP8Precision(recipes[-1], emulate=on_cpu, all_gather=gather, exact_gradients=exact, keep_small=not small)


if __name__ == "__main__":
    given = measure_parser(__doc__).parse_args()
    row = measure(given)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # the strategy starts the others
        given.row.write_text(json.dumps(row))
