"""The GPT-NeoX decoder: the same numbers as transformers, Pythia's sizes, training through the suite's blocks."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_fms.models import NeoX

SIZES = {"vocab_size": 101, "dim": 64, "n_layers": 3, "n_heads": 4}
NAMES = (
    ("attention_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("qkv_proj", "query_key_value"),
    ("o_proj", "dense"), ("ffn.up_proj", "mlp.dense_h_to_4h"), ("ffn.down_proj", "mlp.dense_4h_to_h"),
)  # fmt: skip
# The sizes that are in the models' names count all parameters; arXiv:2304.01373, table 1, and the models' cards.
PYTHIA = {"160m": 162_322_944, "410m": 405_334_016, "1b": 1_011_781_632, "1_4b": 1_414_647_808, "2_8b": 2_775_208_960}


def transformers_name(name: str) -> str:
    """Our parameter name -> the name in `GPTNeoXForCausalLM`."""
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    parts = {"embedding.": "gpt_neox.embed_in.", "norm.": "gpt_neox.final_layer_norm.", "head.": "embed_out."}
    for ours, theirs in parts.items():
        if name.startswith(ours):
            return name.replace(ours, theirs)
    return f"gpt_neox.{name}"


def test_logits_and_gradients_equal_those_of_transformers() -> None:
    torch.manual_seed(0)
    model = NeoX(**SIZES).double()
    peer = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=101, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
            hidden_act="gelu", attn_implementation="sdpa", use_parallel_residual=True, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        )
    ).double()  # fmt: skip
    known = dict(peer.named_parameters())
    renamed = {transformers_name(name): tensor for name, tensor in model.state_dict().items()}
    if "lm_head.weight" in known:
        renamed["lm_head.weight"] = renamed.pop("embed_out.weight")
    peer.load_state_dict(renamed)
    ids = torch.randint(101, (2, 33))
    ours, theirs = model(ids), peer(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)  # rotary angles are fp32
    weights = torch.randn_like(ours)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    mine = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    its = sum(p.grad.square().sum() for p in peer.parameters() if p.grad is not None)
    torch.testing.assert_close(mine, its, atol=0, rtol=1e-5)


@pytest.mark.parametrize(("name", "parameters"), PYTHIA.items())
def test_a_shipped_shape_has_as_many_parameters_as_pythia(name: str, parameters: int) -> None:
    cfg = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / f"pythia_{name}.yaml")
    sizes = {str(k): v for k, v in OmegaConf.to_container(cfg.net).items() if k != "_target_"}  # type: ignore[union-attr]
    with torch.device("meta"):
        model = NeoX(**{**sizes, "vocab_size": 50_304})
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [({"n_heads": 5}, "dim must be a multiple"), ({"rotary_fraction": 0.2}, "3 values, which must be even")],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeoX(**{**SIZES, **change})  # type: ignore[arg-type]


def test_weights_have_the_names_and_the_order_that_checkpoints_know() -> None:
    block = (
        "attention_norm", "attention.qkv_proj", "attention.o_proj", "ffn_norm", "ffn.up_proj", "ffn.down_proj",
    )  # fmt: skip
    layers = [f"layers.{n}.{name}.{kind}" for n in range(3) for name in block for kind in ("weight", "bias")]
    expected = ["embedding.weight", *layers, "norm.weight", "norm.bias", "head.weight"]
    assert list(NeoX(**SIZES).state_dict()) == expected
