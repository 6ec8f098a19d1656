"""A transformers model, built from its config (no download), in a plain LightningModule. Run: python examples/huggingface.py"""

import lightning as L
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_fms import FP8Precision, FSDPCompileStrategy, RescalableDataModule, TritonKernels
from lightning_fms.data.sources import PythonSource

SIZE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}


class HuggingFaceModule(L.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(config)  # or .from_pretrained(name)

    def training_step(self, batch, batch_idx):
        # labels[t] follows input_ids[t]: they are shifted already, which transformers is told by shift_labels.
        labels = batch["labels"]
        return self.model(batch["input_ids"], labels=labels, shift_labels=labels).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_steps=20,
        strategy=FSDPCompileStrategy(),
        plugins=[FP8Precision("tensorwise", emulate=not torch.cuda.is_available(), keep_small=False)],
        callbacks=[TritonKernels()],
        log_every_n_steps=10,
    )
    data = RescalableDataModule({"code": PythonSource("code")}, seq_len=64, global_batch_size=8)
    trainer.fit(HuggingFaceModule(LlamaConfig(vocab_size=257, use_cache=False, **SIZE)), data)
    print("loss", float(trainer.callback_metrics["loss"]))
