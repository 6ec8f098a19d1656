"""The reference user code: a plain `nn.Module` decoder and a plain LightningModule around it."""

from lightning_fms.models.causal_lm import CausalLM
from lightning_fms.models.encoder import TextEncoder, ViT
from lightning_fms.models.encoder_tasks import ImageClassifier, MaskedLM
from lightning_fms.models.generation import generate
from lightning_fms.models.llama import Llama
from lightning_fms.models.neox import NeoX
from lightning_fms.models.schedule import WarmupCosine

__all__ = [
    "CausalLM",
    "ImageClassifier",
    "Llama",
    "MaskedLM",
    "NeoX",
    "TextEncoder",
    "ViT",
    "WarmupCosine",
    "generate",
]
