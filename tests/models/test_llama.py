"""The reference decoder: the same numbers as transformers, positions, causality, meta build, initialisation."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fms.models import Llama
from lightning_fms.models.llama import rotary_tables

SIZES = {"vocab_size": 101, "dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 96}


def transformers_names(name: str) -> str:
    """Our parameter name -> the name in `LlamaForCausalLM`."""
    for ours, theirs in (
        ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attention.", "self_attn."),
        ("ffn.", "mlp."),
        ("embedding", "embed_tokens"),
    ):
        name = name.replace(ours, theirs)
    return name.replace("head.weight", "lm_head.weight") if name.startswith("head") else f"model.{name}"


def peer_of(model: Llama, tie: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=96,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=tie,
        attn_implementation="sdpa",
    )
    peer = LlamaForCausalLM(config)
    peer.load_state_dict({transformers_names(name): tensor for name, tensor in model.state_dict().items()})
    return peer


@pytest.mark.parametrize("tie", [False, True])
def test_logits_and_gradients_equal_those_of_transformers(tie: bool) -> None:
    torch.manual_seed(0)
    model = Llama(**SIZES, tie_embeddings=tie).double()
    peer = peer_of(model, tie).double()
    ids = torch.randint(101, (2, 33))
    ours, theirs = model(ids), peer(input_ids=ids).logits
    # The rotary angles are fp32 in both, hence not 1e-12.
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    gradients = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        expected = gradients[transformers_names(name)].grad
        torch.testing.assert_close(parameter.grad, expected, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_position_ids_are_the_positions_and_only_differences_matter() -> None:
    torch.manual_seed(0)
    model = Llama(**SIZES)
    ids = torch.randint(101, (2, 16))
    default = model(ids)
    shifted = model(ids, torch.arange(1000, 1016).expand(2, 16))
    doubled = model(ids, torch.arange(0, 32, 2).expand(2, 16))
    torch.testing.assert_close(default, shifted, atol=1e-4, rtol=1e-4)
    assert (default - doubled).abs().max() > 1e-3


def test_a_later_token_changes_nothing_before_it() -> None:
    torch.manual_seed(0)
    model = Llama(**SIZES)
    ids = torch.randint(101, (1, 16))
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % 101
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_rotary_angles_stay_exact_in_a_bf16_model() -> None:
    cos, _ = rotary_tables(torch.tensor([[4095]]), 64, 10_000.0)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(
        cos[0, 0, 0, 0].double(), torch.tensor(4095.0, dtype=torch.float64).cos(), atol=1e-6, rtol=0
    )
    assert Llama(**SIZES).bfloat16()(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_a_model_built_on_meta_and_filled_module_by_module_starts_like_one_built_in_place() -> None:
    with torch.device("meta"):
        model = Llama(**SIZES)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()
    torch.manual_seed(0)
    reference = Llama(**SIZES)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert abs(parameter.std(correction=0) - expected.std(correction=0)) < 2e-3, name


def test_residual_projections_start_smaller_with_depth() -> None:
    torch.manual_seed(0)
    model = Llama(101, dim=128, n_layers=8, n_heads=4)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            expected = 0.02 / 4 if name.endswith(("o_proj", "down_proj")) else 0.02
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), name
    loss = nn.functional.cross_entropy(model(torch.randint(101, (4, 64))).flatten(0, 1), torch.randint(101, (256,)))
    assert loss.item() == pytest.approx(torch.tensor(101.0).log().item(), abs=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"n_layers": 0}, "n_layers=0"), ({"n_heads": 5}, "n_heads=5"), ({"n_kv_heads": 3}, "n_kv_heads=3")],
)
def test_impossible_sizes_are_refused_by_name(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(**{**SIZES, **change})


def test_weights_have_the_names_and_the_order_that_checkpoints_know() -> None:
    block = (
        "attention_norm", "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj",
        "ffn_norm", "ffn.gate_proj", "ffn.up_proj", "ffn.down_proj",
    )  # fmt: skip
    layers = [f"layers.{number}.{name}.weight" for number in range(3) for name in block]
    assert list(Llama(**SIZES).state_dict()) == ["embedding.weight", *layers, "norm.weight", "head.weight"]
