"""Encoders: sizes, both tasks learn, and a plan of a model whose batch is no text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

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
