"""The ways to compute in FP8, by name: three of torchao (`float8`) and our own (`fused`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_fms.precision import float8, fused
from lightning_fms.precision.selection import Decision

FUSED = "fused"
RECIPES = (*float8.RECIPES, FUSED)


@dataclass(frozen=True)
class Recipe:
    """One way to compute in FP8.

    Args:
        name: `tensorwise | rowwise | rowwise_gw_hp | fused`.
        emulate: compute the GEMMs in fp32 on operands rounded to FP8: the same errors, on any device, slowly.
        all_gather: cast weights before FSDP gathers them; `tensorwise` only.
        exact_gradients: gradients are added up in fp32, see `row_scaled.linear`; `fused` only.

    Raises:
        ValueError: for an unknown name, or an option that the recipe does not have.
    """

    name: str
    emulate: bool = False
    all_gather: bool = False
    exact_gradients: bool = False

    def __post_init__(self) -> None:
        if self.name not in RECIPES:
            raise ValueError(f"recipe={self.name!r}: choose one of {', '.join(RECIPES)}")
        if self.all_gather and self.name != "tensorwise":
            raise ValueError(f"recipe={self.name!r} has no FP8 all-gather: use recipe='tensorwise' or all_gather=False")
        if self.exact_gradients and self.name != FUSED:
            raise ValueError(
                f"recipe={self.name!r} has no exact gradients: use recipe='fused' or exact_gradients=False (rowwise_gw_hp "
                "computes that of the weight in bf16)"
            )

    def convert(self, module: nn.Module, decisions: Sequence[Decision], shards: int = 1) -> list[Decision]:
        """Convert the chosen layers in place, see `float8.convert` and `fused.convert`; decisions with notes added."""
        if self.name == FUSED:
            return fused.convert(module, decisions, self.emulate, self.exact_gradients)
        gather = self.all_gather and shards > 1
        config = float8.float8_config(self.name, emulate=self.emulate, all_gather=gather)
        return float8.convert(module, decisions, config, shards)


def restore(module: nn.Module) -> None:
    """Give every layer that any recipe converted its plain class back."""
    float8.restore(module)
    fused.restore(module)
