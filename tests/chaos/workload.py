"""The run that is put through everything, and the two books by which it is judged.

It is a real one: streamed rows of two sources, dropout, AdamW, a schedule, sharded over the ranks, saved by `StepCheckpoint`
and stopped by `Resilience`. Each rank writes down which rows it trained at a step, and rank 0 the hash of all weights after
it. An uninterrupted run gives the rows that each step must have. A resumed one must begin with the weights of exactly the
step that was committed; on the same number of ranks every later hash must be the uninterrupted run's, too.
"""

import hashlib
import json
import logging
import os
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fms.callbacks import Resilience, StepCheckpoint
from lightning_fms.data import RescalableDataModule
from lightning_fms.distributed import FSDPCompileStrategy, latest_committed
from tests.chaos.attempts import Attempt
from tests.data.chains import write_jsonl

BATCH, SEQ_LEN = 6, 16


@dataclass(frozen=True)
class Plan:
    """A run. store: its checkpoints and books. micro: rows of a micro-batch, which makes accumulation. slow_s: of each step."""

    corpus: Path
    store: Path
    steps: int = 8
    every: int = 2
    micro: int | None = None
    keep: int = 2
    val_every: int | None = None
    step_zero: bool = False
    slow_s: float = 0.0
    deadline_s: float = 30.0
    mask_first: bool = True
    asynchronous: bool = False
    dropout: float = 0.2
    epoch: int | None = None

    @property
    def checkpoints(self) -> Path:
        return self.store / "checkpoints"


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.up(x)))


class Small(pl.LightningModule):
    """A plain module with dropout, so that random numbers matter."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, 8)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(8, 257)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Books(pl.Callback):
    """Writes `books/<attempt>.<rank>.jsonl`, a line an event, and touches `at/<phase>` where a test waits for one."""

    def __init__(self, plan: Plan, attempt: str) -> None:
        self.plan, self.rank = plan, int(os.environ["RANK"])
        (plan.store / "books").mkdir(parents=True, exist_ok=True)
        self._file = (plan.store / "books" / f"{attempt}.{self.rank}.jsonl").open("a")
        self._rows: list[str] = []
        self._step = 0

    def write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        self.write(event="start", step=trainer.global_step, weights=weight_hash(pl_module))
        if self.plan.step_zero and trainer.global_step == 0:
            trainer.save_checkpoint(self.plan.checkpoints / "step-0.ckpt")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for index in torch.nonzero(batch["row_valid"]).flatten().tolist():
            content = batch["input_ids"][index].numpy().tobytes() + batch["labels"][index].numpy().tobytes()
            self._rows.append(hashlib.blake2b(content, digest_size=8).hexdigest())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        time.sleep(self.plan.slow_s)
        self._step = trainer.global_step
        loss = float(trainer.callback_metrics["loss"])
        entry = {"rows": self._rows, "weights": weight_hash(pl_module), "loss": loss}
        self.write(event="step", step=self._step, **entry)
        self._rows = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.write(event="validation", step=trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))


class Reported(StepCheckpoint):
    """Says in the books what it has saved."""

    def _committed(self, trainer: pl.Trainer, step: int) -> None:
        super()._committed(trainer, step)
        if trainer.is_global_zero:
            books = next(c for c in vars(trainer)["callbacks"] if isinstance(c, Books))
            books.write(event="saved", step=step)


def weight_hash(module: nn.Module) -> str:
    """Of every bit of all weights; collective."""
    content = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(module.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        content.update(name.encode() + whole.detach().cpu().numpy().tobytes())
    return content.hexdigest()


def train(plan: Plan, attempt: str, resume: Path | None, extra: tuple[pl.Callback, ...] = ()) -> None:
    """What each rank of an attempt does."""
    if plan.every:
        saver = Reported(plan.checkpoints, plan.every, plan.keep, asynchronous=plan.asynchronous)
        extra = (*extra, saver, Resilience(deadline_s=plan.deadline_s))
    train_with(plan, attempt, resume, FSDPCompileStrategy(), Small, extra)


def train_with(
    plan: Plan, attempt: str, resume: Path | None, strategy: Any, make: Callable[[float], pl.LightningModule],
    callbacks: tuple[pl.Callback, ...],
) -> None:  # fmt: skip
    """The same, made of other parts."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, callbacks=[Books(plan, attempt), *callbacks],
        max_steps=plan.steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        use_distributed_sampler=False, num_sanity_val_steps=0, log_every_n_steps=1, default_root_dir=plan.store,
        gradient_clip_val=1.0,
    )  # fmt: skip
    validation = {"val_sources": {"c": plan.corpus / "c"}, "val_steps": 3, "val_every_n_steps": plan.val_every}
    data = RescalableDataModule(
        sources={"p": plan.corpus / "p", "c": plan.corpus / "c"}, seq_len=SEQ_LEN, global_batch_size=BATCH,
        micro_batch_size=plan.micro, mask_first=plan.mask_first, steps_per_epoch=plan.epoch,
        **(validation if plan.val_every else {}),
    )  # fmt: skip
    trainer.fit(make(plan.dropout), data, ckpt_path=resume)


def start(plan: Plan, attempt: str, world: int, extra: tuple[pl.Callback, ...] = ()) -> Attempt:
    """Begin an attempt that goes on from the newest checkpoint, as `resume=auto` does."""
    return Attempt(
        plan.store / "logs" / attempt, world, train, plan, attempt, latest_committed(plan.checkpoints), extra
    )


def write_corpus(folder: Path) -> Path:
    write_jsonl(folder / "p", "p", 60)
    write_jsonl(folder / "c", "c", 30)
    return folder


# ---- the books


@dataclass
class Account:
    """What the books of one attempt say. rows, weights, losses, val_losses: by the step that ended."""

    start: int | None = None
    start_weights: str | None = None
    rows: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    weights: dict[int, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    val_losses: dict[int, float] = field(default_factory=dict)
    saved: list[int] = field(default_factory=list)


def account(plan: Plan, attempt: str) -> Account:
    """Read the books of an attempt; the last line of a killed rank may be torn."""
    found = Account()
    for file in sorted((plan.store / "books").glob(f"{attempt}.*.jsonl")):
        for entry in _entries(file):
            step = entry["step"]
            if entry["event"] == "start":
                found.start, found.start_weights = step, entry["weights"]
            elif entry["event"] == "step":
                found.rows[step] = sorted(found.rows[step] + entry["rows"])
                found.weights[step], found.losses[step] = entry["weights"], entry["loss"]
            elif entry["event"] == "validation":
                found.val_losses[step] = entry["loss"]
            else:
                found.saved.append(step)
    return found


def _entries(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def uninterrupted(plan: Plan, world: int) -> Account:
    """The books of the same run that nothing happens to, and that is never saved."""
    calm = Plan(**{**asdict(plan), "store": plan.store / f"calm-{world}", "every": 0, "slow_s": 0.0})
    codes = start(calm, "calm", world).codes()
    assert codes == [0] * world
    return account(calm, "calm")


def check(found: Account, reference: Account, same_world: bool, first: int, last: int | None = None) -> None:
    """Hold an attempt against the uninterrupted run.

    Args:
        found: Its books.
        reference: Those of the uninterrupted run.
        same_world: Whether both have equally many ranks, so that every bit must agree.
        first: The step that it must have begun behind.
        last: The last step that it must have trained, `None` if it may have ended anywhere.
    """
    assert found.start == first, f"began behind step {found.start}, not {first}"
    if last is not None:
        assert sorted(found.weights) == list(range(first + 1, last + 1))
    for step in sorted(found.weights):
        complete = len(found.rows[step]) == len(reference.rows[step])  # else a rank was killed before it wrote its own
        assert Counter(found.rows[step]) <= Counter(reference.rows[step]), f"step {step} trained other rows"
        assert complete or last is None, f"step {step} trained too few or too many rows"
        if same_world:
            assert found.weights[step] == reference.weights[step], f"weights differ after step {step}"
        else:
            assert abs(found.losses[step] - reference.losses[step]) < 1e-4, f"the loss differs at step {step}"
