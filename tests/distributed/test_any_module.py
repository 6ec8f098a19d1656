"""Modules that know nothing of us: other people's architectures train on two ranks as stock Lightning trains them on one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo_world import once, run_world
from tiny import Recorder, Rows, Run, V, trainer
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

from lightning_fms.distributed import FSDPCompileStrategy
from tests.distributed.test_parity import assert_same_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*treespec.*", "ignore:.*a frame.*", "ignore:.*skip_guard.*"
)
WIDTH: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": V,
    "use_cache": False,
}


class Plain(pl.LightningModule):
    """What a user writes around a model of somebody else."""

    make: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.net = type(self).make()

    def loss(self, batch: Tensor) -> Tensor:
        logits_BTV = self.net(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Llama(Plain):
    make = staticmethod(lambda: LlamaForCausalLM(LlamaConfig(**WIDTH, intermediate_size=32)))


class GPT2(Plain):
    """Tied, with weights that are no `nn.Linear`."""

    make = staticmethod(
        lambda: GPT2LMHeadModel(
            GPT2Config(
                n_embd=16,
                n_layer=2,
                n_head=2,
                vocab_size=V,
                n_positions=8,
                use_cache=False,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        )
    )


class Mixture(Plain):
    """Experts are chosen by the data, so its blocks cannot be traced."""

    make = staticmethod(
        lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **WIDTH,
                intermediate_size=32,
                moe_intermediate_size=16,
                num_experts=4,
                num_experts_per_tok=2,
                head_dim=8,
                num_key_value_heads=2,
                experts_implementation="eager",  # the grouped product knows no double
            )
        )
    )


class EncoderDecoder(Plain):
    """Two stacks, and an embedding that both share with the head; built in `configure_model`."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            config = T5Config(
                d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=V, dropout_rate=0.0, use_cache=False,
                decoder_start_token_id=0,
            )  # fmt: skip
            self.net = T5ForConditionalGeneration(config).double()

    def loss(self, batch: Tensor) -> Tensor:
        logits_BTV = self.net(input_ids=batch[:, 1:], decoder_input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch[:, 1:].flatten())


class Vision(Plain):
    """A Sequential of blocks, a class token that belongs to no layer, dropout modules; built in `setup`."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net: Any = None

    def setup(self, stage: str) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = VisionTransformer(8, 4, 2, 2, 16, 32, num_classes=V).double()
            nn.init.normal_(self.net.heads.head.weight)  # torchvision starts it at zero

    def loss(self, batch: Tensor) -> Tensor:
        pixels = torch.sin(batch[:, :1].double()[:, :, None, None] + torch.arange(192).view(3, 8, 8))
        return nn.functional.cross_entropy(self.net(pixels), batch[:, 1])


class NoBlocks(Plain):
    """One LSTM: nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, V)

    make = staticmethod(lambda: nn.LSTM(V, 16, batch_first=True))

    def loss(self, batch: Tensor) -> Tensor:
        hidden_BTD, _ = self.net(nn.functional.one_hot(batch[:, :-1], V).double())
        return nn.functional.cross_entropy(self.head(hidden_BTD).flatten(0, 1), batch[:, 1:].flatten())


MODULES = {kind.__name__: kind for kind in (Llama, GPT2, Mixture, EncoderDecoder, Vision, NoBlocks)}


def run(name: str, strategy: Any) -> tuple[Run, list[str]]:
    pl.seed_everything(7, verbose=False)
    recorder = Recorder()
    fitted = trainer(recorder, strategy, max_steps=3)
    fitted.fit(MODULES[name]().double(), Rows(3))
    return recorder.run, strategy.report.lines() if strategy != "auto" else []


def ours(names: list[str]) -> dict[str, tuple[Run, list[str]]]:
    compiled = {"compile": True, "compile_options": {"backend": "aot_eager"}}
    return {
        name: run(name, FSDPCompileStrategy(**(compiled if name in ("Mixture", "Vision") else {}))) for name in names
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def compute(folder: Path) -> Any:
        return {name: run(name, "auto")[0] for name in MODULES}, run_world(2, ours, folder, list(MODULES))[0]

    return once(tmp_path_factory, "any-module", compute)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_somebody_else_trains_as_under_stock_lightning(runs: Any, name: str) -> None:
    stock, split = runs
    assert_same_run(split[name][0], stock[name], tolerance=1e-9)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Llama", "blocks: net.model.layers.0, net.model.layers.1"),
        ("GPT2", "net.transformer.wte stays in the root group: it shares a parameter with net.lm_head.weight"),
        ("Mixture", "Qwen3MoeDecoderLayer runs uncompiled"),
        ("EncoderDecoder", "blocks: 4 (net.encoder.block.0 ... net.decoder.block.1)"),
        ("Vision", "blocks: net.encoder.layers.encoder_layer_0, net.encoder.layers.encoder_layer_1"),
        ("NoBlocks", "blocks: none"),
    ],
)
def test_the_report_says_what_became_of_it(runs: Any, name: str, line: str) -> None:
    assert any(found.startswith(line) for found in runs[1][name][1]), runs[1][name][1]
