"""FP8 as a precision plugin of Lightning's Trainer.

Everything that is no GEMM of a linear layer runs in bf16, as under `precision="bf16-mixed"`, which is also what the
plugin reports. Stock strategies enter its contexts around a step, and these are autocast, as in Lightning's
`MixedPrecision`. `FSDPCompileStrategy` casts parameters itself and does not enter them.

The plugin goes into the Trainer as an instance (`plugins=[FP8Precision()]`), never beside `precision=`: Lightning has
no registry for precision names.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch._inductor.config as inductor_config
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_fms.precision.float8 import drop_scales, precompute_scales
from lightning_fms.precision.fused import FusedWeights
from lightning_fms.precision.recipes import FUSED, Recipe, restore
from lightning_fms.precision.selection import Decision, decide, summary, table
from lightning_fms.precision.support import check_device, self_test


class FP8Precision(Precision):
    """Train the linear layers of any LightningModule in FP8, and the rest in bf16.

    Conversion happens when the strategy sets the module up, before FSDP and compilation. Parameters keep their names,
    dtypes and values, so checkpoints load with and without the plugin. `trainer.fit` ends with the plain module back.

    Args:
        recipe: `tensorwise` (the default), `rowwise` (robust to outliers), `rowwise_gw_hp` (most exact: the gradient of the
            weight stays in bf16), all three by torchao; or `fused` (our own: row scales, in fewer passes over memory).
        emulate: compute FP8's rounding in fp32, for machines without FP8 and for tests. Several times slower than bf16.
        all_gather: gather sharded weights in FP8, half the bytes of bf16; `tensorwise` only, and only under
            `FSDPCompileStrategy`. Off by default: it pays when communication is exposed. Cannot be undone at the end of a
            fit, because the optimizer holds the wrapped weights.
        exact_gradients: add up both gradients in fp32; `fused` only, in which the tensor cores add them up in their own
            precision of about 14 bits, as they add up the output in every recipe. Off by default: neither the error of a
            layer nor a loss curve shows a difference (docs/fp8.md), and it costs 4 % of a step.
        head: convert the output head too. Off by default: its rounding errors go straight into the loss.
        keep_small: keep layers in bf16 that are too small to gain. Turn it off to convert everything that can be.
        skip: patterns of names, as in a shell (`*.mlp.router`), that stay in bf16.

    Attributes:
        report: after setup, a headline (also logged) and a table of what was converted, what was not and why.

    Raises:
        ValueError: for an unknown recipe, or an option that it does not have; at setup, for a device without FP8 or a
            pattern in `skip` that matches nothing.
        RuntimeError: at setup, if FP8 computes wrong numbers on this machine.
    """

    precision = "bf16-mixed"

    def __init__(
        self,
        recipe: str = "tensorwise",
        emulate: bool = False,
        all_gather: bool = False,
        exact_gradients: bool = False,
        head: bool = False,
        keep_small: bool = True,
        skip: Sequence[str] = (),
    ) -> None:
        self.recipe, self.emulate, self.all_gather = recipe, emulate, all_gather
        self.exact_gradients = exact_gradients
        self._recipe = Recipe(recipe, emulate, all_gather, exact_gradients)
        self.head, self.keep_small, self.skip = head, keep_small, tuple(skip)
        self.report: list[str] = []
        self.decisions: list[Decision] = []
        self._converted: nn.Module | None = None
        self._device = torch.device("cpu")
        self._inductor_before: bool | None = None
        self._weights: FusedWeights | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Check the device, compare FP8 with bf16 on it, and convert `module` in place; again is harmless."""
        strategy = _strategy_of(module)
        self._device = strategy.root_device if strategy is not None else next(module.parameters()).device
        self._check_machine()
        mesh = getattr(strategy, "mesh_shape", None)  # of a strategy that shards after this call, as only ours does
        if mesh is not None and mesh.tensor > 1:
            raise ValueError(
                f"FP8Precision beside tensor parallelism (tensor={mesh.tensor}) has not been tested: set tensor=1 in the strategy, "
                "or take precision bf16-mixed"
            )
        shards = None if mesh is None else mesh.shard
        decisions = decide(module, self.recipe, head=self.head, keep_small=self.keep_small, skip=self.skip)
        self.decisions = self._recipe.convert(module, decisions, shards or 1)
        drop_scales(module)
        self._converted = module
        self._describe(shards)
        return module

    def on_weights_loaded(self, module: nn.Module) -> None:
        """Forget scales of the weights before: a strategy calls it when it has copied a checkpoint into `module`.

        `load_state_dict` tells by itself; a copy in place does not, and a stale scale overflows silently.
        """
        drop_scales(module)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Forget what was made of the weights: they changed in a way that moves no version counter."""
        if self._weights is not None:
            self._weights.invalidate()

    @contextmanager
    def weights_held(self) -> Generator[None, None, None]:
        """Weights are rounded once after they changed, not in each forward (`fused` only).

        A strategy that holds whole weights enters it around forward and backward.
        """
        if self.recipe != FUSED or self._converted is None:
            yield
            return
        if self._weights is None:
            self._weights = FusedWeights(self._converted)
        with self._weights.active():
            yield

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: L.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Step, then compute the scales of weights that are gathered in FP8, all in one all-reduce."""
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if self.all_gather:
            precompute_scales(model)
        return result

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """bf16 autocast; a strategy that casts parameters itself does not enter it."""
        with torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=False):
            yield

    def teardown(self) -> None:
        """Give the module its plain layers back, and the compiler its settings."""
        if self._converted is not None:
            restore(self._converted)
            self._converted = self._weights = None
        if self._inductor_before is not None:
            inductor_config.emulate_precision_casts = self._inductor_before
            self._inductor_before = None

    def _check_machine(self) -> None:
        if self._converted is not None:
            return
        if not self.emulate:
            check_device(self._device)
        if self.recipe in ("rowwise", "rowwise_gw_hp") and self._inductor_before is None:
            # torchao's row scales + compile + selective checkpointing gave NaN: https://github.com/pytorch/pytorch/issues/150859
            self._inductor_before = inductor_config.emulate_precision_casts
            inductor_config.emulate_precision_casts = True
        self_test(self._recipe, self._device, compiled=False)
        if self._device.type == "cuda":
            self_test(self._recipe, self._device, compiled=True)

    def _describe(self, shards: int | None) -> None:
        headline = f"FP8 {self.recipe}{' (emulated)' if self.emulate else ''}: {summary(self.decisions)}"
        problems = []
        if not any(decision.converted for decision in self.decisions):
            problems.append("FP8: nothing to convert, the run is bf16. keep_small=False converts small layers too")
        if self.all_gather and shards is None:
            problems.append("FP8: all_gather=True does nothing here, it needs FSDPCompileStrategy")
        elif self.all_gather and shards == 1:
            problems.append("FP8: all_gather=True does nothing here, parameters are not sharded")
        before, self.report = self.report, [headline, *table(self.decisions), *problems]
        if self.report != before:
            rank_zero_info("\n".join([headline, *problems]))


def _strategy_of(module: nn.Module) -> Any:
    """The strategy of the Trainer that `module` is attached to, if any."""
    trainer = module._trainer if isinstance(module, L.LightningModule) else None
    return None if trainer is None else trainer.strategy
