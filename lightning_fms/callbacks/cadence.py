"""When an optimizer step ended, and when it is time to log.

Lightning calls `on_train_batch_end` once per micro-batch. What costs a device synchronisation or a collective must
happen only on the steps that are logged anyway, and on every rank at the same step.
"""

import lightning as L


def logging_due(trainer: L.Trainer, steps_ahead: int = 0) -> bool:
    """Whether metrics are written to the loggers at the optimizer step that just ended, or at one `steps_ahead` of it."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (trainer.global_step + steps_ahead) % every == 0


class StepClock:
    """Notices the micro-batches that end an optimizer step."""

    def __init__(self) -> None:
        self.step = 0

    def start(self, trainer: L.Trainer) -> None:
        """Begin at the step that the trainer is at, which is not 0 after a resume."""
        self.step = trainer.global_step

    def ended_step(self, trainer: L.Trainer) -> bool:
        """Whether an optimizer step ended since the last call."""
        ended = trainer.global_step != self.step
        self.step = trainer.global_step
        return ended
