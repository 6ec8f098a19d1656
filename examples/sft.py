"""Fine-tune on questions and answers: only the answers are targets. Run: python examples/sft.py [FOLDER]"""

import ast
import json
import sys
import sysconfig
import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import torch

from lightning_fms import RescalableDataModule
from lightning_fms.models import CausalLM, Llama

LENGTH, END = 128, 256  # tokens of a row; the byte tokenizer's end-of-document token
MODULES = ("argparse", "collections/__init__", "datetime", "fractions", "heapq", "pathlib", "statistics", "threading")


def write_pairs(folder: Path) -> None:
    """Real text: what functions of the standard library do, in the words of their docstrings."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for name in MODULES:
        tree = ast.parse(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                answer = " ".join(docstring.split("\n\n")[0].split())
                pairs.append({"prompt": f"What does {node.name} do?", "answer": answer})
    for part, chosen in (("train", slice(None, -32)), ("val", slice(-32, None))):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[chosen]))


def read(record: dict) -> dict | None:
    """Make a row of a record: `labels[t]` is what should follow `input_ids[t]`, -100 where that is the question's."""
    prompt, answer = (list(record[key].encode()) for key in ("prompt", "answer"))
    tokens = [*prompt, ord("\n"), *answer, END]
    if len(tokens) > LENGTH + 1:
        return None  # left out
    input_ids, labels = np.full(LENGTH, END), np.full(LENGTH, -100)
    input_ids[: len(tokens) - 1] = tokens[:-1]
    labels[len(prompt) : len(tokens) - 1] = tokens[len(prompt) + 1 :]
    return {"input_ids": input_ids, "labels": labels}


def main(folder: Path) -> None:
    write_pairs(folder)
    L.seed_everything(0, verbose=False)
    module = CausalLM(Llama(vocab_size=257, dim=64, n_layers=2, n_heads=4), partial(torch.optim.AdamW, lr=3e-3))
    data = RescalableDataModule(
        {"pairs": folder / "train.jsonl"},
        seq_len=None,
        global_batch_size=16,
        packing="none",
        reader=read,
        val_sources={"pairs": folder / "val.jsonl"},
        val_one_pass=True,  # every pair once
    )
    trainer = L.Trainer(max_steps=60, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    (after,) = trainer.validate(module, data, verbose=False)
    print(f"loss of the answers: {before['val_loss']:.3f} before, {after['val_loss']:.3f} after")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
