"""Encoders: sizes, both tasks learn, and a plan of a model whose batch is no text."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from lightning_fms.data import StreamLoader
from lightning_fms.models import ImageClassifier, MaskedLM, TextEncoder, ViT
from lightning_fms.planner.space import Configuration
from lightning_fms.planning.jobs import probe, structure_of

SMALL: dict[str, int] = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 64}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


@pytest.mark.parametrize(("name", "millions"), [("roberta_large", 354), ("vit_large", 304)])
def test_a_shipped_shape_is_as_large_as_the_model(name: str, millions: int) -> None:
    cfg = OmegaConf.load(Path(__file__).parents[2] / "conf" / "model" / f"{name}.yaml")
    sizes: Any = {str(k): v for k, v in OmegaConf.to_container(cfg.net).items()}  # type: ignore[union-attr]
    kind = {"TextEncoder": TextEncoder, "ViT": ViT}[sizes.pop("_target_").rpartition(".")[2]]
    with torch.device("meta"):
        model = kind(**sizes | ({"vocab_size": 50_265} if "vocab_size" in sizes else {}))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.005)


def test_an_encoder_learns_what_stands_behind_a_mask() -> None:
    torch.manual_seed(0)
    module = MaskedLM(TextEncoder(16, **SMALL, max_tokens=24), optimizer, share=0.2)
    steps, rows = module.configure_optimizers(), torch.arange(15).repeat(8, 2)[:, :24]
    before = module.loss({"input_ids": rows}).item()
    for _ in range(120):
        steps.zero_grad()
        module.training_step({"input_ids": rows}, 0).backward()
        steps.step()
    assert before > 2.5
    assert module.loss({"input_ids": rows}).item() < 0.5


class Sees(torch.nn.Module):
    """Keeps what it is shown, and answers with the same logits whatever that is."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(258, 1)  # 256 bytes, EOS, and the mask
        self.logits = torch.nn.Parameter(torch.randn(rows, tokens, 258, generator=torch.Generator().manual_seed(0)))
        self.shown: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.shown.append(input_ids)
        return self.logits


def padded_rows(folder: Path) -> dict[str, torch.Tensor]:
    """A document a row, with padding behind it."""
    (folder / "a.jsonl").write_text('{"text": "a document that is too long to stand beside another"}\n' * 20)
    loader = StreamLoader({"a": folder / "a.jsonl"}, seq_len=64, global_batch_size=2, packing="best_fit")
    return next(iter(loader))


def test_padding_is_neither_masked_nor_predicted(tmp_path: Path) -> None:
    batch, net = padded_rows(tmp_path), Sees(2, 64)
    module, learned = MaskedLM(net, optimizer, share=1.0), batch["labels"] != -100
    assert 0 < learned.sum() < learned.numel()
    expected = F.cross_entropy(net.logits[learned], batch["input_ids"][learned])  # with this share all that may be
    torch.manual_seed(0)
    for _ in range(20):
        torch.testing.assert_close(module.loss(batch), expected)
    shown = torch.stack(net.shown)
    assert (shown[:, ~learned] == batch["input_ids"][~learned]).all()
    assert (shown[:, learned] == 257).float().mean() == pytest.approx(0.8, abs=0.05)
    module.loss(batch).backward()
    assert (net.logits.grad[~learned] == 0).all()
    assert (net.logits.grad[learned] != 0).all()


def test_the_loss_of_a_batch_of_which_nothing_is_chosen_is_0(tmp_path: Path) -> None:
    batch = padded_rows(tmp_path)
    module = MaskedLM(Sees(2, 64), optimizer)
    loss = module.loss({**batch, "labels": torch.full_like(batch["labels"], -100)})
    loss.backward()
    assert loss.item() == 0
    assert (module.net.logits.grad == 0).all()


def test_a_vit_tells_classes_of_images_apart() -> None:
    torch.manual_seed(0)
    module = ImageClassifier(ViT(2, **SMALL, image_size=16, patch_size=4), optimizer)
    batch = {"image": torch.randn(16, 3, 16, 16), "label": torch.arange(16) % 2}
    batch["image"][::2, 0] += 1
    steps = module.configure_optimizers()
    for _ in range(40):
        steps.zero_grad()
        module.training_step(batch, 0).backward()
        steps.step()
    assert module.loss(batch).item() < 0.1


def test_a_plan_takes_the_batch_that_the_module_gives() -> None:
    net = {"_target_": "lightning_fms.models.ViT", "classes": 10, **SMALL, "image_size": 16, "patch_size": 4}
    adamw = {"_target_": "torch.optim.AdamW", "_partial_": True, "fused": True}
    config = {
        "model": {"_target_": "lightning_fms.models.ImageClassifier", "net": net, "optimizer": adamw},
        "strategy": {}, "data": {"seq_len": 16},
    }  # fmt: skip
    job = {"config": config, "precision": {"bf16": {"name": "bf16-mixed"}}, "kernels": {"none": {}}, "rows": [2, 3]}
    known = probe(job, [Configuration()], 1)[structure_of(Configuration())]
    assert known.error is None
    assert known.depth == 2


def test_a_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 9 tokens, and max_tokens=8"):
        TextEncoder(10, **SMALL, max_tokens=8)(torch.zeros(1, 9, dtype=torch.int64))
