"""Attention within documents on one GPU: what the mask costs or saves, and that it is right.

    python benchmarks/document_mask.py                       # one H200, a minute

Forward and backward of causal attention [1, heads, tokens, 128] in bf16: one document a row by FlashAttention (no mask), and
FlexAttention with the documents of `document_ids`, for shorter and shorter documents. `error` is the largest difference of the
output from `scaled_dot_product_attention` with the same mask as booleans, in fp32. Then the reference model trains a few
steps under the strategy, compiled, with the mask of real rows.
"""

import argparse
import functools

import lightning as L
import torch
from torch import Tensor
from triton.testing import do_bench

from lightning_fms.data import RescalableDataModule
from lightning_fms.data.sources import PythonSource
from lightning_fms.distributed import FSDPCompileStrategy
from lightning_fms.models import CausalLM, Llama
from lightning_fms.models.document_mask import document_mask, masked_attention


def attention(tokens: int, heads: int, documents: int, device: str = "cuda") -> str:
    """One row of the table."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, upstream = (
        torch.randn(1, heads, tokens, 128, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    starts = torch.randperm(tokens - 1, device=device, generator=generator)[: documents - 1] + 1
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    ids[0, starts] = 1
    ids = ids.cumsum(1)
    mask = None if documents == 1 else document_mask(ids)

    def run() -> Tensor:
        out = masked_attention(q, k, v, mask)
        out.backward(upstream)
        q.grad = k.grad = v.grad = None
        return out

    with torch.no_grad():
        same = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(
            tokens, tokens, dtype=torch.bool, device=device
        ).tril()
        exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=same)
    error = (run().detach().float() - exact).abs().max().item()
    ms = do_bench(run, return_mode="median")
    build = do_bench(lambda: document_mask(ids), return_mode="median")
    return f"{documents:>9} {ms:>12.2f} {build:>12.2f} {error:>12.1e}"


def train() -> list[float]:
    """Losses of a few compiled steps of a small model on real rows."""
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *_) -> None:
            losses.append(float(outputs["loss"]))

    L.seed_everything(0, verbose=False)
    sources = {"prose": PythonSource("docstrings"), "code": PythonSource("code")}
    datamodule = RescalableDataModule(sources, 1024, 8, tokenizer="bytes", packing="best_fit")
    module = CausalLM(
        Llama(257, 512, 4, 4, 2), functools.partial(torch.optim.AdamW, lr=1e-3, fused=True), mask_documents=True
    )
    trainer = L.Trainer(
        accelerator="gpu", devices=1, max_steps=30, strategy=FSDPCompileStrategy(),
        callbacks=[Losses()], precision="bf16-mixed", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=datamodule)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    arguments = parser.parse_args()
    print(f"{'documents':>9} {'fwd+bwd ms':>12} {'mask ms':>12} {'error':>12}")
    for documents in (1, 2, 8, 32):
        print(attention(arguments.tokens, arguments.heads, documents), flush=True)
    losses = train()
    print("losses of the compiled steps:", " ".join(f"{loss:.2f}" for loss in losses[::5]), f"{losses[-1]:.2f}")


if __name__ == "__main__":
    main()
