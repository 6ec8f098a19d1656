"""The reference user code: a plain `nn.Module` decoder and a plain LightningModule around it."""

from lightning_fms.models.causal_lm import CausalLM
from lightning_fms.models.generation import generate
from lightning_fms.models.llama import Llama
from lightning_fms.models.neox import NeoX
from lightning_fms.models.schedule import WarmupCosine

__all__ = ["CausalLM", "Llama", "NeoX", "WarmupCosine", "generate"]
