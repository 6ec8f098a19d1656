"""Learning-rate schedules of language-model training.

Warm-up avoids the steps in which AdamW's second moment is still a guess; the cosine brings the rate to a small
fraction, not to zero, as in GPT-3 and Llama. The multiplier is a function of the step alone, so a resumed run needs
nothing but the step.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine_multiplier(step: int, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Fraction of the peak rate at `step`: linear to 1 over `warmup_steps`, then a half cosine to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * done))


class WarmupCosine(LambdaLR):
    """Linear warm-up, cosine decay.

    Args:
        optimizer: whose rates are scaled.
        warmup_steps: optimizer steps until the peak rate; 0 starts at the peak. `None` = 100, or a tenth of a shorter schedule.
        total_steps: optimizer steps until the rate is at `final_fraction`; it stays there.
        final_fraction: of the peak rate. 0.1 as in Llama.

    Raises:
        ValueError: if the warm-up does not end before the schedule, or `final_fraction` is outside [0, 1].
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: int | None = None,
        total_steps: int = 1000,
        final_fraction: float = 0.1,
    ) -> None:
        warmup_steps = min(100, total_steps // 10) if warmup_steps is None else warmup_steps
        if total_steps < 1:
            raise ValueError(
                f"{total_steps=}: the schedule needs an end; give trainer.max_steps, or scheduler.total_steps"
            )
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"{warmup_steps=} is not below {total_steps=}: warm-up must end before the schedule does; lower warmup_steps "
                "or train for more steps"
            )
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"{final_fraction=}: must be between 0 and 1")
        super().__init__(optimizer, lambda step: cosine_multiplier(step, warmup_steps, total_steps, final_fraction))
