"""A small real run for the callback tests: a plain module, a data module of random tokens with a tokenizer."""

from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fms.models import CausalLM, Llama

VOCAB, SEQ_LEN, ROWS = 31, 16, 4


class Letters:
    """A tokenizer of 31 ids."""

    vocab_size, eos_id = VOCAB, 0

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (VOCAB - 1) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + i) for i in ids)


class Rows(Dataset):
    def __init__(self, with_filler: bool) -> None:
        self.tokens = torch.randint(VOCAB, (400, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        self.with_filler = with_filler

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}
        if self.with_filler:
            row["row_valid"] = torch.tensor(index % 2 == 0)
        return row


class RandomTokens(L.LightningDataModule):
    def __init__(self, with_filler: bool = False) -> None:
        super().__init__()
        self.rows, self.tokenizer = Rows(with_filler), Letters()
        self.report = ["data: random tokens"]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, ROWS)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, ROWS)

    def mix_report(self) -> dict[str, dict[str, float]]:
        return {"noise": {"share": 1.0, "target": 1.0, "epoch": 0.5, "tokens": 64.0}}


def tiny_module(lr: float = 1e-2) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(Llama(VOCAB, dim=32, n_layers=2, n_heads=2), partial(torch.optim.AdamW, lr=lr))


def trainer(tmp_path: Any, *callbacks: L.Callback, **changes: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "max_steps": 6, "log_every_n_steps": 2, "accelerator": "cpu", "devices": 1, "logger": False,
        "enable_checkpointing": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "limit_val_batches": 0, "default_root_dir": tmp_path,
    }  # fmt: skip
    settings |= (
        {"enable_progress_bar": False}
        if not any(isinstance(c, L.pytorch.callbacks.ProgressBar) for c in callbacks)
        else {}
    )
    return L.Trainer(callbacks=list(callbacks), **{**settings, **changes})
