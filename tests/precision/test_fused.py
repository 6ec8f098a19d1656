"""The fused recipe: what its rounding promises, and what it does with modules and weights."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from fp8_runs import THIRD_PARTY_WARNINGS, Counting, causal_lm, plugin, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.distributed.place import Settings, place
from lightning_fms.gated_mlp import GatedMLP, find_gated_mlp
from lightning_fms.models import Llama
from lightning_fms.precision import fused
from lightning_fms.precision.fused import FusedGatedMLP, FusedWeights
from lightning_fms.precision.quantize_rows import quantize_rows
from lightning_fms.precision.recipes import Recipe
from lightning_fms.precision.row_scaled import gated_mlp, linear, quantize_weight, weight_gradient
from lightning_fms.precision.selection import decide
from lightning_fms.precision.transpose_rows import transpose_rows

pytestmark = THIRD_PARTY_WARNINGS
RELATIVE_ROUNDING = 2.0**-4  # of a normal number with 3 bits of mantissa


def to_fused(module: nn.Module) -> nn.Module:
    Recipe("fused", emulate=True).convert(module, decide(module, "fused", keep_small=False))
    return module


def relative(got: Tensor, right: Tensor) -> float:
    return ((got.float() - right.float()).norm() / right.float().norm()).item()


class Gated(nn.Module):
    """A gated MLP with names that say nothing."""

    def __init__(self, activation: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(64, 96, bias=bias)
        self.b = nn.Linear(96, 64, bias=bias)
        self.c = nn.Linear(64, 96, bias=bias)
        self.activation = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.activation(self.c(x)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 70), st.integers(-40, 40))
def test_each_value_is_rounded_once_and_scales_are_powers_of_two(seed: int, rows: int, width: int, size: int) -> None:
    random = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(rows, width, generator=random)
        * 2.0**size
        * 2.0 ** torch.randint(-9, 9, (rows, 1), generator=random)
    )
    values, scales = quantize_rows(x)
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales.tolist())
    largest = (values.float().abs().amax(1)).tolist()
    assert all(208 <= value <= 448 for value in largest)  # the range is used to within a binade (and a rounding down)
    error = (values.float() * scales[:, None] - x).abs()
    assert (error <= x.abs() * RELATIVE_ROUNDING + scales[:, None] * 2.0**-10).all()


def test_other_layout_has_the_same_values() -> None:
    values, scales = quantize_rows(torch.randn(37, 50) * torch.logspace(-2, 2, 37)[:, None])
    assert torch.equal(transpose_rows(values).float(), values.float().t())
    factor = scales / scales.max()
    shifted = transpose_rows(values, factor).float().t()
    exact = values.float() * factor[:, None]
    assert ((shifted - exact).abs() <= 2.0**-10).all()  # half of the smallest number of e4m3: nothing else is rounded
    assert torch.equal(shifted[factor == 1], exact[factor == 1])


@pytest.mark.parametrize("spread", [0, 3, 8])
def test_error_of_the_weight_gradient_does_not_grow_with_the_spread_of_tokens(spread: float) -> None:
    torch.manual_seed(0)
    grad = torch.randn(512, 96) * torch.logspace(0, -spread, 512)[torch.randperm(512)][:, None]
    x = torch.randn(512, 64)
    got = weight_gradient(*quantize_rows(grad), *quantize_rows(x), emulate=True)
    assert relative(got, grad.t() @ x) < 0.045


def test_an_outlier_costs_its_own_row_only() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x[5, 7] = 1e6
    others = torch.arange(32) != 5
    assert relative(linear(x, weight, emulate=True)[others], (x @ weight.t())[others]) < 0.045
    tensorwise = nn.Sequential(nn.Linear(64, 48, bias=False))
    tensorwise[0].weight.data.copy_(weight)
    Recipe("tensorwise", emulate=True).convert(tensorwise, decide(tensorwise, "tensorwise", keep_small=False))
    assert relative(tensorwise(x)[others], (x @ weight.t())[others]) > 0.5


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_in_the_result(odd: float) -> None:
    x, weight = torch.randn(16, 64), torch.randn(48, 64).requires_grad_()
    x[3, 4] = odd
    output = linear(x, weight, emulate=True)
    assert not output[3].isfinite().any()
    assert output[:3].isfinite().all()
    output.sum().backward()
    assert not weight.grad.isfinite().all()


def test_gated_mlp_is_as_exact_as_three_layers() -> None:
    torch.manual_seed(0)
    mlp, x, grad = Gated(), torch.randn(64, 64), torch.randn(64, 64)
    weights = [mlp.c.weight, mlp.a.weight, mlp.b.weight]
    right = torch.autograd.grad(mlp(x), weights, grad)
    got = torch.autograd.grad(gated_mlp(x, *weights, emulate=True), weights, grad.bfloat16())
    gate, up, down = weights
    hidden = F.silu(linear(x, gate, emulate=True)) * linear(x, up, emulate=True)
    apart = torch.autograd.grad(linear(hidden, down, emulate=True), weights, grad.bfloat16())
    for fused_, three, exact in zip(got, apart, right, strict=True):
        assert relative(fused_, exact) < 1.1 * relative(three, exact) < 0.09


def test_gated_mlps_are_found_whatever_their_names_are() -> None:
    assert find_gated_mlp(Gated()) == GatedMLP(gate="c", up="a", down="b")
    config = LlamaConfig(hidden_size=64, intermediate_size=96)
    assert find_gated_mlp(LlamaMLP(config)) == GatedMLP("gate_proj", "up_proj", "down_proj")
    with torch.device("meta"):
        assert find_gated_mlp(Gated()) is not None


@pytest.mark.parametrize(
    "mlp",
    [
        Gated(nn.GELU()),
        Gated(nn.Sequential(nn.SiLU(), nn.Dropout(0.5))),
        Gated(nn.Sequential(nn.SiLU(), nn.Hardtanh())),
        Gated(bias=True),
        nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)),
        nn.TransformerEncoderLayer(64, 4, 96),
    ],
)
def test_what_does_anything_else_is_no_gated_mlp(mlp: nn.Module) -> None:
    assert find_gated_mlp(mlp) is None


def test_layer_with_a_hook_keeps_being_called() -> None:
    mlp, calls = Gated(), []
    mlp.b.register_forward_hook(lambda *_: calls.append(1))
    to_fused(mlp)(torch.randn(16, 64))
    assert calls == [1]
    assert not isinstance(mlp, FusedGatedMLP)


def test_weights_are_rounded_once_a_step_and_never_used_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, x = to_fused(Gated()), torch.randn(16, 64)
    rounded = []
    monkeypatch.setattr(fused, "quantize_weight", lambda *groups: rounded.append(1) or quantize_weight(*groups))
    held = FusedWeights(mlp)
    for _ in range(3):
        with held.active():
            inside = mlp(x)
    assert len(rounded) == 2  # gate above up, and down
    assert torch.equal(inside, mlp(x))  # outside the layers round for themselves
    with torch.no_grad():
        mlp.b.weight.mul_(2)
    assert torch.equal(mlp(x), 2 * inside)
    with held.active():
        assert torch.equal(mlp(x), 2 * inside)
        mlp.b.weight.data.mul_(2)  # moves no version counter
        held.invalidate()
        assert torch.equal(mlp(x), 4 * inside)


def test_accumulated_run_follows_bf16_and_rounds_weights_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    curves, rounded = [], []
    plain = FusedWeights._round
    monkeypatch.setattr(FusedWeights, "_round", lambda self, weights: rounded.append(1) or plain(self, weights))
    for fp8 in (None, plugin("fused")):
        torch.manual_seed(0)
        run, losses = trainer(fp8=fp8, strategy=FSDPCompileStrategy(compile=False), accumulate_grad_batches=3)
        run.fit(causal_lm(), DataLoader(Counting(), batch_size=4))
        curves.append(losses.losses)
    assert 0 < max(abs(a - b) for a, b in zip(*curves, strict=True)) < 0.1
    assert len(rounded) == run.global_step == 4


class Zeroes(L.Callback):
    """Edits a weight as no version counter shows, and looks in the next step at what layers compute with."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        _, down = module.net.layers[0].ffn._fused_weights
        self.largest.append(down.rows.float().abs().max().item())

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        module.net.layers[0].ffn.down_proj.weight.data.zero_()


def test_an_edit_between_steps_reaches_the_fp8_weights() -> None:
    looks = Zeroes()
    strategy = FSDPCompileStrategy(compile=False)
    run, _ = trainer(fp8=plugin("fused"), strategy=strategy, max_steps=2, callbacks=[looks])
    run.fit(causal_lm(), DataLoader(Counting(), batch_size=4))
    assert looks.largest[0] > 0
    assert looks.largest[1] == 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_activations_give_the_same_run(mode: str) -> None:
    curves = []
    for checkpointing in ("none", mode):
        torch.manual_seed(0)
        strategy = FSDPCompileStrategy(compile=False, activation_checkpointing=checkpointing)
        run, losses = trainer(fp8=plugin("fused"), strategy=strategy)
        run.fit(causal_lm(), DataLoader(Counting(), batch_size=4))
        curves.append(losses.losses)
    assert curves[0] == curves[1]


def kept_bytes(recipe: str | None, mode: str) -> int:
    """What a compiled block keeps for its backward, without its weights."""
    torch._dynamo.reset()
    net = Llama(64, 64, 2, 4, ffn_dim=192).bfloat16()
    if recipe is not None:
        to_fused(net)
    options = {"backend": "aot_eager_decomp_partition"}
    how = Settings(compile=True, compile_strict=True, compile_options=options, activation_checkpointing=mode)
    placed = place(net, how, None, torch.device("cpu"), 0, MixedPrecisionPolicy(), False)
    assert len(placed.report.recomputed) == (0 if mode == "none" else 2)
    seen = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        kept += 0 if storage.data_ptr() in seen else storage.nbytes()
        seen.add(storage.data_ptr())
        return tensor

    block, own = net.layers[1], net.layers[1].forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return own(*args, **kwargs)

    block.forward = counted
    net(torch.arange(256)[None] % 64).float().sum().backward()
    return kept


@pytest.mark.filterwarnings("ignore")
def test_recomputing_a_compiled_block_frees_what_fp8_would_keep() -> None:
    recomputed = kept_bytes(None, "full")
    assert kept_bytes("fused", "none") > 5 * recomputed
    assert kept_bytes("fused", "full") <= 1.1 * recomputed


def test_operations_are_registered_rightly() -> None:
    ops = torch.ops.lightning_fms
    x, wide = torch.randn(16, 32), torch.randn(16, 64)
    values, scales = quantize_rows(x)
    # `test_schema` multiplies outputs by a number, which FP8 tensors cannot do.
    check = functools.partial(torch.library.opcheck, test_utils=("test_faketensor", "test_autograd_registration"))
    check(ops.quantize_rows, (x,))
    check(ops.transpose_rows, (values, scales))
    check(ops.transpose_rows, (values, None))
    check(ops.swiglu_rows, (wide,))
    check(ops.swiglu_rows_backward, (x, wide))
    check(ops.quantize_weight_rows, ([x, x],))
    check(ops.quantize_weight_columns, ([x, x],))


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted_fp8.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
