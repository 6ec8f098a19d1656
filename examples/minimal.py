"""A user's own module with the suite's plugins: only the lines marked with <- are new. Run: python examples/minimal.py"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from lightning_fms import FP8Precision, FSDPCompileStrategy, RescalableDataModule, TritonKernels
from lightning_fms.data.sources import PythonSource


class MyModule(L.LightningModule):
    def __init__(self, dim=64):
        super().__init__()
        self.embed = nn.Embedding(257, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim), nn.SiLU()) for _ in range(2))
        self.head = nn.Linear(dim, 257, bias=False)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).view(-1, 257), batch["labels"].view(-1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    trainer = L.Trainer(
        max_steps=30,
        strategy=FSDPCompileStrategy(),  # <-
        plugins=[FP8Precision("tensorwise", emulate=not torch.cuda.is_available())],  # <-
        callbacks=[TritonKernels()],  # <-
        log_every_n_steps=10,
    )
    data = RescalableDataModule({"code": PythonSource("code")}, seq_len=128, global_batch_size=8)  # <-
    trainer.fit(MyModule(), data)
    print("loss", float(trainer.callback_metrics["loss"]))
