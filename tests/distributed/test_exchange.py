"""Weights in and out under Hugging Face's names, bit by bit, and what is wrong with a folder said before a weight is touched."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import run_world
from tiny import Recorder, Rows, Tiny, V, trainer, whole_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_fms.callbacks import InitialWeights
from lightning_fms.distributed import CheckpointError, FSDPCompileStrategy
from lightning_fms.distributed.export import export, import_weights
from lightning_fms.models import Llama

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*",
    "ignore:Be aware that when using `ckpt_path`, callbacks",
)
SETTINGS = {"n_heads": 4}


class Ours(Tiny):
    def __init__(self, tied: bool = False) -> None:
        super().__init__(n_layers=0)
        self.embedding, self.layers, self.norm, self.head, self.scale = None, None, None, None, None
        self.net = self.make(tied)

    def make(self, tied: bool) -> nn.Module:
        return Llama(V, 16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=32, tie_embeddings=tied)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(tokens_BT)


class Theirs(Ours):
    def make(self, tied: bool) -> nn.Module:
        return LlamaForCausalLM(llama_config(tied))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.net(input_ids=tokens_BT).logits


def llama_config(tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False,
        num_key_value_heads=2, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        rms_norm_eps=1e-5, max_position_embeddings=64,
    )  # fmt: skip


def train(
    kind: str, tied: bool, steps: int, weights: Path | None = None, save: Path | None = None, **options: Any
) -> Any:
    """Train and save; return the whole weights at the start and at the end."""
    pl.seed_everything(3, verbose=False)
    first: list[Any] = []

    class Start(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with trainer.strategy._stored_weights() as module:
                first.append(whole_weights(module))

    callbacks = [Start(), *([InitialWeights(str(weights))] if weights else [])]
    resume = options.pop("ckpt_path", None)
    fitted = trainer(Recorder(), FSDPCompileStrategy(), callbacks=callbacks, max_steps=steps, **options)
    module = (Ours if kind == "ours" else Theirs)(tied)
    fitted.fit(module, Rows(8), Rows(2, seed=1), ckpt_path=resume)
    if save is not None:
        fitted.save_checkpoint(save)
    return first[0], whole_weights(module)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_trained_model_opens_in_transformers_with_the_same_logits(kind: str, tied: bool, tmp_path: Path) -> None:
    _, weights = run_world(2, train, tmp_path / "world", kind, tied, 2, None, tmp_path / "step-2")[0]
    files = export(tmp_path / "step-2", tmp_path / "out", settings=SETTINGS, shard_bytes=4000)
    assert len(files) > 2
    if kind == "theirs":
        llama_config(tied).save_pretrained(tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(model.lm_head.weight, weights["net.head.weight" if kind == "ours" else "net.lm_head.weight"])
    module = (Ours if kind == "ours" else Theirs)(tied)
    module.load_state_dict(weights)
    tokens = torch.randint(0, V, (2, 5))
    torch.testing.assert_close(model(input_ids=tokens).logits, module(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_folder_comes_in_and_goes_out_bit_by_bit(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(llama_config(tied))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    for number, result in enumerate(
        [
            train("ours", tied, 1, tmp_path / "theirs"),
            *run_world(2, train, tmp_path / "world", "ours", tied, 1, tmp_path / "theirs"),
        ]
    ):
        start, _ = result
        names = {
            "net.embedding.weight": "model.embed_tokens.weight",
            "net.layers.1.ffn.up_proj.weight": "model.layers.1.mlp.up_proj.weight",
        }
        for ours, theirs in names.items():
            assert torch.equal(start[ours], model.state_dict()[theirs]), number
    import_weights(tmp_path / "theirs", tmp_path / "imported")
    export(tmp_path / "imported", tmp_path / "again", names="own")
    llama_config(tied).save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert equal(again.state_dict(), model.state_dict())
    assert equal(train("ours", tied, 1, tmp_path / "imported")[0], train("ours", tied, 1, tmp_path / "theirs")[0])


def test_a_resumed_run_keeps_its_own_weights(tmp_path: Path) -> None:
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path / "theirs")
    _, weights = train("ours", False, 2, None, tmp_path / "step-2")
    start, _ = train("ours", False, 3, tmp_path / "theirs", ckpt_path=tmp_path / "step-2")
    assert equal(start, weights)


def test_exported_weights_are_rounded_once(tmp_path: Path) -> None:
    _, weights = train("ours", False, 1, None, tmp_path / "step-1", precision="bf16-mixed")
    export(tmp_path / "step-1", tmp_path / "out", dtype="bfloat16", settings=SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, weights["net.head.weight"].bfloat16())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lose a file", "is missing or damaged"),
        ("cut a file", "is missing or damaged"),
        ("move a tensor", "lacks model.embed_tokens.weight, which its index has in"),
        ("another width", r"is of another model; \d+ tensors differ: .*saved, .*here"),
        (
            "another depth",
            r"is of another model; 9 tensors differ: .*only in the model.*; give the settings of the model",
        ),
        ("nothing", "nothing there; give a checkpoint, or a file or folder of safetensors"),
        ("any folder", "holds neither a checkpoint nor safetensors; give the folder of one"),
    ],
)
def test_a_folder_that_is_not_whole_or_of_another_model_is_refused(damage: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    config = llama_config()
    config.hidden_size = 32 if damage == "another width" else 16
    config.num_hidden_layers = 1 if damage == "another depth" else 2
    if damage == "another width":
        config.head_dim = 8
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="5KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    victim = folder / index["weight_map"]["model.embed_tokens.weight"]
    if damage == "lose a file":
        victim.unlink()
    elif damage == "cut a file":
        victim.write_bytes(victim.read_bytes()[:100])
    elif damage == "move a tensor":
        other = next(f for f in sorted(folder.glob("*.safetensors")) if f != victim)
        victim.write_bytes(other.read_bytes())
    path = {"nothing": tmp_path / "elsewhere", "any folder": tmp_path}.get(damage, folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        train("ours", False, 1, path)
    assert caught.value.__cause__ is not caught.value  # who follows the chain would never arrive


def test_an_export_overwrites_nothing_and_names_what_it_does_not_know(tmp_path: Path) -> None:
    train("ours", False, 1, None, tmp_path / "step-1")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists; give a new folder"):
        export(tmp_path / "step-1", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype='fp16': give one of float32, bfloat16, float16"):
        export(tmp_path / "step-1", tmp_path / "new", dtype="fp16")
    assert not (tmp_path / "new").exists()
