"""Images in a folder a class, the rare class as often as the other. Run: python examples/image_folder.py [FOLDER]"""

import io
import sys
import tempfile
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from lightning_fms import RescalableDataModule

DIGITS = {"seven": ["###", "..#", ".#.", ".#.", ".#."], "one": [".#.", "##.", ".#.", ".#.", "###"]}
COUNTS = {"seven": 120, "one": 30}
NAMES = sorted(DIGITS)


def write_images(folder: Path) -> None:
    """Draw digits in random places and colours, under noise: FOLDER/train/one/000.png, ..."""
    rng = np.random.default_rng(0)
    for part, share in (("train", 1.0), ("val", 0.5)):
        for name, lines in DIGITS.items():
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            shape = np.array([[char == "#" for char in line] for line in lines]).repeat(2, axis=0).repeat(2, axis=1)
            for number in range(int(COUNTS[name] * share)):
                image = rng.integers(0, 120, (16, 16, 3), dtype=np.uint8)
                top, left = rng.integers(0, 7), rng.integers(0, 11)
                image[top : top + 10, left : left + 6][shape] += rng.integers(60, 136, 3, dtype=np.uint8)
                Image.fromarray(image).save(folder / part / name / f"{number:03d}.png")


def read(data) -> dict:
    """Make a row of a file: its bytes, and the folder that it is in."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return {"pixels": pixels.transpose(2, 0, 1), "labels": NAMES.index(data.path.parent.name)}


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
        self.net = nn.Sequential(*convolutions, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 2))

    def forward(self, pixels):
        return self.net(pixels / 255 - 0.5)  # uint8 until here

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["pixels"]), batch["labels"])

    def validation_step(self, batch, batch_idx):
        right = self(batch["pixels"]).argmax(1) == batch["labels"]
        self.log("accuracy", right[batch["labels"] >= 0].float().mean())  # -100 where a batch has no row

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: Path) -> None:
    write_images(folder)
    L.seed_everything(0, verbose=False)
    sources, val = ({name: folder / part / name for name in NAMES} for part in ("train", "val"))
    options = {"global_batch_size": 32, "packing": "none", "reader": read, "mixture": {"one": 1, "seven": 1}}
    data = RescalableDataModule(sources, seq_len=None, **options, val_sources=val, val_one_pass=True)
    trainer = L.Trainer(max_steps=80, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), data)
    shares = {name: f"{entry['share']:.0%}" for name, entry in data.mix_report().items()}
    (result,) = trainer.validate(trainer.model, data, verbose=False)
    print(f"shares of the rows {shares}, accuracy {result['accuracy']:.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
