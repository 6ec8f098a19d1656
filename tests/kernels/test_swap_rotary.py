"""Rotations in other people's networks: found by name, proved by trying, replaced and put back."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from lightning_fms.kernels import TritonKernels
from lightning_fms.kernels.swap_rotary import ReplacedRotary, find_form
from lightning_fms.models import Llama, llama

SWAP = sys.modules["lightning_fms.kernels.swap_rotary"]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
NETWORKS: dict[str, Any] = {
    "ours": lambda: Llama(53, 32, 2, 4),
    "transformers' Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "transformers' GPT-NeoX, partial": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}


def loss_and_gradients(net: nn.Module) -> list[Tensor]:
    tokens = torch.arange(24).view(2, 12) % 53
    out = net(tokens)
    out = getattr(out, "logits", out)
    loss = out.float().log_softmax(-1)[..., 0].mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_networks_rotation_is_replaced_with_the_same_numbers_and_put_back(name: str, monkeypatch) -> None:
    torch.manual_seed(0)
    net, calls = NETWORKS[name](), []
    plain, own = loss_and_gradients(net), SWAP.rotary
    monkeypatch.setattr(SWAP, "rotary", lambda *args, **options: calls.append(1) or own(*args, **options))
    before = llama.rotate, modeling_llama.apply_rotary_pos_emb
    callback = TritonKernels(rotary=True, linear_cross_entropy=False, rms_norm=False)
    callback.transform_module(net)
    assert any("rotary embedding: fused at" in line for line in callback.report), callback.report
    calls.clear()
    torch.testing.assert_close(loss_and_gradients(net), plain, rtol=1e-5, atol=1e-6)
    assert len(calls) == 4  # queries and keys of two layers
    callback.restore()
    assert (llama.rotate, modeling_llama.apply_rotary_pos_emb) == before
    assert all(torch.equal(a, b) for a, b in zip(loss_and_gradients(net), plain, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_block_takes_the_replacement() -> None:
    net = NETWORKS["transformers' Llama"]()
    plain, replaced = loss_and_gradients(net), ReplacedRotary()
    replaced.replace(net)
    layer = net.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss_and_gradients(net), plain, rtol=1e-5, atol=1e-6)
    replaced.restore()


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, k, cos, -sin)


def with_a_bug(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, k, cos, sin)[0], k


def other_arguments(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    return turned(q, k, angles.cos(), angles.sin())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (turned, (2, False, True, (1,), False)),
        (interleaved, (1, True, False, (1, 2), True)),
        (llama.rotate, (1, False, True, (1, 2), True)),
        (backwards, None),
        (with_a_bug, None),
        (other_arguments, None),
    ],
)
def test_what_a_function_does_is_found_by_trying(function, expected) -> None:
    form = find_form(function)
    found = form and (form.turned, form.interleaved, form.full, form.heads_at, form.unsqueezed)
    assert found == expected


def test_calls_that_were_not_tried_run_their_own_code(monkeypatch) -> None:
    net, replaced = NETWORKS["transformers' Llama"](), ReplacedRotary()
    own = modeling_llama.apply_rotary_pos_emb
    q, k, table = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8)
    wanted = torch.randn(2, 3, 8, requires_grad=True)
    expected = own(q, k, wanted, table), own(q.bfloat16(), k.bfloat16(), table, table), own(q, k, table, table)
    other = own(q.transpose(1, 2), k.transpose(1, 2), table, table, unsqueeze_dim=2)
    replaced.replace(net)
    function = modeling_llama.apply_rotary_pos_emb
    try:
        found = (
            function(q, k, wanted, table),
            function(q.bfloat16(), k.bfloat16(), table, table),
            function(q, k, table, table),
        )
        torch.testing.assert_close(found, expected)  # the dtype of the second is the tables'
        swapped = q.transpose(1, 2), k.transpose(1, 2), table, table
        torch.testing.assert_close(function(*swapped, unsqueeze_dim=2), other)
        torch.testing.assert_close(function(*swapped, 2), other)
    finally:
        replaced.restore()
    assert modeling_llama.apply_rotary_pos_emb is own
