"""A document's logits do not depend on what else is in its row."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fms.data import StreamLoader
from lightning_fms.models import CausalLM, Llama
from lightning_fms.models.document_mask import document_mask


def first_batch(folder: Path, *documents: str, packing: str) -> dict[str, torch.Tensor]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    loader = StreamLoader({"a": path}, seq_len=32, global_batch_size=1, packing=packing, shuffle_window=1)
    return next(iter(loader))


def document_of(batch: dict[str, torch.Tensor], text: str) -> torch.Tensor:
    """Return where a row holds a document (bool [T])."""
    start = bytes(batch["input_ids"][0].clamp(max=255).tolist()).index(text.encode())
    return batch["document_ids"][0] == batch["document_ids"][0, start]


def small_llama() -> Llama:
    torch.manual_seed(0)
    return Llama(257, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, init_std=0.2).eval()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_changing_document_1_leaves_document_2_s_logits_unchanged(tmp_path: Path, packing: str) -> None:
    one = first_batch(tmp_path, "the first document", "another text", packing=packing)
    other = first_batch(tmp_path, "THE FIRST DOCUMENT", "another text", packing=packing)
    second = document_of(one, "another text")
    assert torch.equal(one["input_ids"][0, second], other["input_ids"][0, second])
    assert not torch.equal(one["input_ids"], other["input_ids"])
    net = small_llama()
    with torch.no_grad():
        masked = [
            net(batch["input_ids"], batch["position_ids"], batch["document_ids"])[0, second] for batch in (one, other)
        ]
        open_ = [net(batch["input_ids"])[0, second] for batch in (one, other)]
        alone = net(one["input_ids"][:, second])[0]
    torch.testing.assert_close(masked[0], masked[1], rtol=0, atol=0)
    torch.testing.assert_close(masked[0], alone, rtol=1e-5, atol=1e-5)
    assert (open_[0] - open_[1]).abs().max() > 1e-3


def test_padding_has_finite_logits_and_no_gradient(tmp_path: Path) -> None:
    batch = first_batch(tmp_path, "short", packing="best_fit")
    module = CausalLM(small_llama(), partial(torch.optim.SGD, lr=1.0), mask_documents=True)
    module.loss(batch).backward()
    before = [p.grad.clone() for p in module.parameters()]
    assert all(torch.isfinite(g).all() for g in before)
    changed = dict(batch, input_ids=torch.where(batch["labels"] == -100, 7, batch["input_ids"]))
    last = torch.nonzero(batch["labels"][0] == -100)[0, 0]
    changed["input_ids"][0, last] = batch["input_ids"][0, last]  # EOS, an input of its document
    module.zero_grad()
    module.loss(changed).backward()
    for gradient, parameter in zip(before, module.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_transformers_model_takes_the_same_mask(tmp_path: Path) -> None:
    batch = first_batch(tmp_path, "the first document", "another text", packing="concat")
    torch.manual_seed(0)
    net = LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).eval()
    second = document_of(batch, "another text")
    with torch.no_grad():
        together = net(
            batch["input_ids"], position_ids=batch["position_ids"], attention_mask=document_mask(batch["document_ids"])
        ).logits[0, second]
        alone = net(batch["input_ids"][:, second]).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
