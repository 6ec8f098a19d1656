import pytest
import torch
from torch import nn

from lightning_fms.models import Llama
from lightning_fms.precision.selection import decide, summary, table


class Gated(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).sigmoid()


def reasons(module: nn.Module, recipe: str = "tensorwise", **options: object) -> dict[str, str]:
    return {d.name: d.reason for d in decide(module, recipe, **options)}


def meta_llama(**options: object) -> Llama:
    with torch.device("meta"):
        return Llama(**{"vocab_size": 128256, "dim": 4096, "n_layers": 1, "n_heads": 32, "n_kv_heads": 8} | options)


def test_llama_8b_shape_converts_what_gains() -> None:
    found = reasons(meta_llama(ffn_dim=14336))
    assert [name for name, reason in found.items() if not reason] == [
        "layers.0.attention.q_proj",
        "layers.0.attention.o_proj",
        "layers.0.ffn.gate_proj",
        "layers.0.ffn.up_proj",
        "layers.0.ffn.down_proj",
    ]
    assert found["layers.0.attention.k_proj"] == "too small to gain"
    assert found["head"] == "output head"
    assert reasons(meta_llama(ffn_dim=14336), keep_small=False)["layers.0.attention.k_proj"] == ""
    assert reasons(meta_llama(ffn_dim=14336), head=True)["head"] == ""


def test_tied_head_stays_even_if_the_head_is_asked_for() -> None:
    assert reasons(meta_llama(tie_embeddings=True), head=True)["head"] == "weight tied to another module"


def test_head_is_found_by_shape_whatever_its_name() -> None:
    net = nn.ModuleDict({"tokens": nn.Embedding(512, 64), "proj": nn.Linear(64, 64), "to_logits": nn.Linear(64, 512)})
    assert reasons(net, keep_small=False) == {"proj": "", "to_logits": "output head"}


def test_embedding_as_large_as_the_blocks_does_not_make_them_heads() -> None:
    net = nn.ModuleDict({"positions": nn.Embedding(64, 64), "a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    assert reasons(net, keep_small=False) == {"a": "", "b": ""}


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(64, 50), "dimensions are no multiples of 16"),
        (nn.Linear(50, 64), "dimensions are no multiples of 16"),
        (nn.Linear(64, 64, dtype=torch.float64), "weight is float64"),
        (Gated(64, 64), "Gated has a forward of its own"),
        (nn.Linear(64, 64), ""),
    ],
)
def test_layers_that_cannot_be_fp8(layer: nn.Linear, reason: str) -> None:
    assert reasons(nn.Sequential(layer), keep_small=False) == {"0": reason}


def test_attention_module_that_bypasses_its_projection_is_left_alone() -> None:
    found = reasons(nn.MultiheadAttention(64, 4), keep_small=False)
    assert found == {"out_proj": "nn.MultiheadAttention reads its weight, not its forward"}


def test_layer_whose_forward_is_replaced_on_the_instance_is_left_alone() -> None:
    net = nn.ModuleDict({"tokens": nn.Embedding(64, 32), "head": nn.Linear(32, 64)})
    net["head"].forward = lambda input: input
    assert reasons(net, keep_small=False, head=True)["head"].startswith("its forward is replaced")


def test_skip_by_pattern_and_a_pattern_that_matches_nothing() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert reasons(net, keep_small=False, skip=["1"]) == {"0": "", "1": "skipped by name"}
    with pytest.raises(ValueError, match=r"skip='\*\.router' matches no linear layer; there are \*"):
        decide(net, "tensorwise", skip=["*.router"])


def test_table_groups_layers_and_says_why() -> None:
    decisions = decide(meta_llama(n_layers=3, ffn_dim=14336), "tensorwise")
    line = summary(decisions)
    assert line.startswith("15 of 22 linear layers (")
    assert line.endswith("; in bf16: 6 too small to gain, 1 output head")
    lines = table(decisions)
    assert [line.split() for line in lines if "down_proj" in line] == [
        ["layers.*.ffn.down_proj", "4096", "x", "14336", "3x", "fp8"]
    ]
    assert any("head" in line and "bf16: output head" in line for line in lines)
