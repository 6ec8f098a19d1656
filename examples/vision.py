"""Nothing here is text: a small ViT on images from an own DataLoader, with the same plugins. Run: python examples/vision.py

`examples/image_folder.py` reads images through the suite's own loader, which goes on with any number of processes.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fms import FP8Precision, FSDPCompileStrategy, TritonKernels

SIZE, PATCH, WIDTH, CLASSES = 16, 4, 64, 4  # pixels, pixels, features, directions of stripes


def images(count, seed):
    """Stripes in one of four directions, of random width and phase, under noise."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    angle = labels[:, None, None] * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    width, phase = (torch.rand(2, count, 1, 1, generator=random) + 0.3) * torch.tensor([1.0, 6.0]).view(2, 1, 1, 1)
    pixels = torch.sin((x * angle.cos() + y * angle.sin()) * width + phase)
    return TensorDataset((pixels + 0.3 * torch.randn(pixels.shape, generator=random))[:, None], labels)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):  # [B, patches, WIDTH]
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class ViT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_steps=60,
        strategy=FSDPCompileStrategy(),
        plugins=[FP8Precision("tensorwise", emulate=not torch.cuda.is_available(), keep_small=False)],
        callbacks=[TritonKernels()],
        log_every_n_steps=10,
    )
    train, val = DataLoader(images(2048, 1), batch_size=32, shuffle=True), DataLoader(images(256, 2), batch_size=64)
    trainer.fit(ViT(), train, val)
    (result,) = trainer.validate(trainer.model, val, verbose=False)
    print("accuracy", result["accuracy"])
