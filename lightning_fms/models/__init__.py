"""The reference user code: a plain `nn.Module` decoder and a plain LightningModule around it."""
