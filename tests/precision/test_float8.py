import copy

import pytest
import torch
from torch import nn
from torchao.float8 import float8_linear

from lightning_fms.models import Llama
from lightning_fms.precision.recipes import RECIPES, Recipe, restore
from lightning_fms.precision.selection import computes_in_fp8, decide
from lightning_fms.precision.support import MAX_ERROR, check_device, self_test

# Dynamo looks at `.grad` of every tensor and hides this warning, except where warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
CPU = torch.device("cpu")


def to_fp8(module: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    Recipe(recipe, emulate=True).convert(module, decide(module, recipe, keep_small=False))
    return module


def llama(**options: object) -> Llama:
    torch.manual_seed(0)
    return Llama(**{"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | options)


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    return ((got - right).norm() / right.norm()).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_of_one_layer_are_those_of_the_formats(recipe: str) -> None:
    errors = self_test(Recipe(recipe, emulate=True), CPU, compiled=False)
    # e4m3 rounds with a relative error of 2.6 % rms, e5m2 with twice that; a product adds the squares of two operands'.
    e4m3, e5m2 = (0.03, 0.045), (0.05, 0.07)
    bounds = {
        "tensorwise": {"output": e4m3, "grad_input": e5m2, "grad_weight": e5m2},
        "rowwise": {"output": e4m3, "grad_input": e4m3, "grad_weight": e4m3},
        "rowwise_gw_hp": {"output": e4m3, "grad_input": e4m3, "grad_weight": (0.0, 1e-6)},
        "fused": {"output": e4m3, "grad_input": e4m3, "grad_weight": e4m3},
    }[recipe]
    for name, (low, high) in bounds.items():
        assert low <= errors[name] <= high, (name, errors)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_a_model_stay_near_those_of_fp32(recipe: str) -> None:
    plain, ids = llama(), torch.randint(0, 256, (2, 32))
    fp8 = to_fp8(copy.deepcopy(plain), recipe)
    for net in (plain, fp8):
        nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    for (name, right), got in zip(plain.named_parameters(), fp8.parameters(), strict=True):
        assert relative(got.grad, right.grad) < 0.2, name
        assert got.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_conversion_keeps_parameters_names_values_hooks_and_class(recipe: str) -> None:
    net = llama()
    before = dict(net.named_parameters())
    q_proj = net.layers[0].attention.q_proj
    calls: list[int] = []
    q_proj.register_forward_hook(lambda *_: calls.append(1))
    q_proj.train(False)
    to_fp8(net, recipe)
    assert net.layers[0].attention.q_proj is q_proj
    assert computes_in_fp8(q_proj)
    assert not q_proj.training
    assert isinstance(q_proj, type(llama().layers[0].attention.q_proj))
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    net(torch.zeros(1, 16, dtype=torch.long))
    assert calls == [1]


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_converting_twice_changes_nothing_and_restore_gives_the_plain_module_back(recipe: str) -> None:
    plain, net = llama(), llama()
    to_fp8(to_fp8(net, recipe), recipe)
    assert sum(computes_in_fp8(m) for m in net.modules()) == 14
    restore(net)
    assert [type(m) for m in net.modules()] == [type(m) for m in plain.modules()]
    assert [set(m.__dict__) for m in net.modules()] == [set(m.__dict__) for m in plain.modules()]
    ids = torch.arange(32)[None]
    assert torch.equal(net(ids), plain(ids))


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_checkpoints_are_those_of_the_plain_module_both_ways(recipe: str) -> None:
    plain, fp8 = llama(), to_fp8(llama(), recipe)
    torch.nn.init.normal_(plain.head.weight)
    fp8.load_state_dict(plain.state_dict())
    assert list(fp8.state_dict()) == list(plain.state_dict())
    again = llama()
    again.load_state_dict(fp8.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), plain.state_dict().values(), strict=True))


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_module_on_meta_is_converted_then_filled(recipe: str) -> None:
    with torch.device("meta"):
        net = llama()
    to_fp8(net, recipe).to_empty(device="cpu")
    torch.manual_seed(1)
    for module in net.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
    assert net.layers[0].ffn.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)  # 0.02 / sqrt(2 * 2 layers)
    assert net(torch.arange(32)[None]).isfinite().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_blocks_compile_without_graph_breaks_and_compute_the_same(recipe: str) -> None:
    net, ids = to_fp8(llama(), recipe), torch.arange(32)[None]
    right = net(ids)
    for block in net.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    assert relative(net(ids), right) < 1e-6


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_autocast_gives_bf16_on_this_device_too(recipe: str) -> None:
    layer = to_fp8(nn.Sequential(nn.Linear(64, 64)), recipe)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.randn(16, 64))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer[0].weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():  # how Lightning validates
        assert layer(torch.randn(16, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_zero_tensors_stay_finite(recipe: str) -> None:
    layer = to_fp8(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe)
    x = torch.zeros(16, 64, requires_grad=True)
    layer(x).backward(torch.zeros(16, 64))
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(layer[0].weight.grad, torch.zeros(64, 64))


@pytest.mark.parametrize("recipe", ["tensorwise", "fused"])
def test_token_count_that_the_hardware_refuses_is_an_error_in_training_only(recipe: str) -> None:
    layer, x = to_fp8(nn.Sequential(nn.Linear(64, 64)), recipe), torch.randn(3, 5, 64)
    with pytest.raises(ValueError, match=r"got 15 tokens \(input \(3, 5, 64\)\).* multiple of 16"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == (3, 5, 64)
    assert to_fp8(nn.Sequential(nn.Linear(64, 64)), "rowwise_gw_hp")(x).shape == (3, 5, 64)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe='int4': choose one of tensorwise, rowwise, rowwise_gw_hp, fused"):
        Recipe("int4")
    with pytest.raises(ValueError, match="recipe='rowwise' has no FP8 all-gather"):
        Recipe("rowwise", all_gather=True)
    with pytest.raises(ValueError, match="recipe='tensorwise' has no exact gradients"):
        Recipe("tensorwise", exact_gradients=True)


def test_self_test_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the weight comes out as zeros, as from the miscompiled store that the test exists for."""
    backward = float8_linear.matmul_with_hp_or_float8_args.backward

    def broken(ctx: object, grad: torch.Tensor) -> tuple[object, ...]:
        grad_input, grad_weight, *rest = backward(ctx, grad)
        return grad_input, torch.zeros_like(grad_weight), *rest

    monkeypatch.setattr(float8_linear.matmul_with_hp_or_float8_args, "backward", staticmethod(broken))
    with pytest.raises(RuntimeError, match=rf"wrong numbers.*grad_weight 1, at most {MAX_ERROR}"):
        self_test(Recipe("tensorwise", emulate=True), CPU, compiled=False)


def test_self_test_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    self_test(Recipe("tensorwise", emulate=True), CPU, compiled=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_device_without_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"FP8 needs a GPU.*but the run is on 'cpu'.*emulate=True"):
        check_device(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"NVIDIA A100 has 8\.0.*precision='bf16-mixed'"):
        check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(torch.device("cuda", 0))
