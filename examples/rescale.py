"""Train on 4 processes, go on with 2, then with 3, and show that the data did not notice.

    python examples/rescale.py [FOLDER]

Real processes, real checkpoints: each phase is started by torchrun, trains 15 steps and ends; the next one resumes from its
checkpoint on another number of processes. Every process writes down the rows that it trained, and an uninterrupted run of one
process does the same. From those notes alone this script finds out which documents were read by whom, whether any was read
twice or left out, and how the losses compare. It ends with a picture, FOLDER/rescale.png (default: runs/rescale).
"""

import json
import os
import pydoc_data.topics
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import lightning as L
import torch

from lightning_fms import FSDPCompileStrategy, RescalableDataModule
from lightning_fms.models import CausalLM, Llama

PHASES = [(4, 15), (2, 30), (3, 45)]  # processes, last step
ROWS, SEQ_LEN, END = 12, 128, 256  # rows a step, tokens a row, the byte tokenizer's end-of-document token


class Notes(L.Callback):
    """Write down every row that this rank trains, and the loss of every step."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        rank, world = trainer.global_rank, trainer.world_size
        for place, row in enumerate(batch["input_ids"][batch["row_valid"]].tolist()):
            stream = rank + place * world  # a step has one row of every stream, and rank r owns streams r, r + W, ...
            self.lines.append({"step": trainer.global_step, "rank": rank, "stream": stream, "tokens": row})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.lines.append({"step": trainer.global_step - 1, "loss": float(trainer.callback_metrics["loss"])})

    def on_train_end(self, trainer, pl_module):
        self.path.with_suffix(f".{trainer.global_rank}.jsonl").write_text("\n".join(map(json.dumps, self.lines)))


def train(folder: Path, name: str, last_step: int, resume: str) -> None:
    """One process of one phase."""
    L.seed_everything(0, verbose=False)
    module = CausalLM(Llama(vocab_size=257, dim=64, n_layers=2, n_heads=4), partial(torch.optim.AdamW, lr=3e-3))
    trainer = L.Trainer(
        max_steps=last_step, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy=FSDPCompileStrategy(),
        callbacks=[Notes(folder / name)], logger=False, enable_checkpointing=False, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = RescalableDataModule({"topics": folder / "topics.jsonl"}, seq_len=SEQ_LEN, global_batch_size=ROWS)
    trainer.fit(module, data, ckpt_path=resume or None)
    trainer.save_checkpoint(folder / f"{name}.ckpt")


def write_corpus(path: Path) -> None:
    """Real text: the paragraphs of Python's help topics, each with a number in front."""
    paragraphs = [
        part for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n") if len(part) > 200
    ]
    path.write_text("".join(json.dumps({"text": f"{i}:{text}"}) + "\n" for i, text in enumerate(paragraphs)))


def launch(folder: Path, name: str, world: int, last_step: int, resume: str) -> None:
    """Start a phase and wait for its end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    arguments = [__file__, str(folder), "--phase", name, str(last_step), resume]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    finished = subprocess.run(command + arguments, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(f"phase {name} failed:\n{finished.stderr}")


def read_notes(folder: Path, name: str) -> list[dict]:
    return [
        json.loads(line) for path in sorted(folder.glob(f"{name}.*.jsonl")) for line in path.read_text().splitlines()
    ]


def documents(notes: list[dict]) -> list[int]:
    """Put the rows of each stream end to end, and return the numbers of the documents that are complete in there."""
    rows = sorted((line for line in notes if "tokens" in line), key=lambda line: (line["stream"], line["step"]))
    found = []
    for stream in range(ROWS):
        line = [token for row in rows if row["stream"] == stream for token in row["tokens"]]
        text, ends = bytes(0 if token == END else token for token in line), [i for i, t in enumerate(line) if t == END]
        starts = [0, *(end + 1 for end in ends)]
        found += [int(text[start:end].split(b":")[0]) for start, end in zip(starts, ends, strict=False)]
    return found


def compare(folder: Path) -> None:
    """Print what each phase read, and the rescaled run beside the uninterrupted one."""
    phases = {f"{world}-ranks": read_notes(folder, f"{world}-ranks") for world, _ in PHASES}
    whole, together = read_notes(folder, "whole"), [line for notes in phases.values() for line in notes]
    before = 0
    for (world, last), name in zip(PHASES, phases, strict=True):
        read = Counter(
            documents([line for notes in list(phases.values())[: list(phases).index(name) + 1] for line in notes])
        )
        shown = sorted(read - Counter(documents([line for line in together if line["step"] < before])))
        print(f"steps {before:2d}-{last - 1:2d} on {world} processes finished {len(shown)} documents: {_short(shown)}")
        before = last
    losses = [{line["step"]: line["loss"] for line in notes if "loss" in line} for notes in (together, whole)]
    print("\nstep   4 -> 2 -> 3 processes   uninterrupted")
    for step in range(0, PHASES[-1][1], 4):
        print(f"{step:4d}   {losses[0][step]:21.6f}   {losses[1][step]:13.6f}")
    apart = max(abs(losses[0][step] - losses[1][step]) for step in losses[1])
    print(f"largest difference of a loss over all {len(losses[1])} steps: {apart:.1e}")
    picture(folder / "rescale.png", together, losses)
    read, expected = Counter(documents(together)), Counter(documents(whole))
    print(f"picture: {folder / 'rescale.png'}")
    repeated, skipped = (read - expected).total(), (expected - read).total()
    print(f"{expected.total()} documents: {repeated} repeated, {skipped} skipped")


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def picture(path: Path, notes: list[dict], losses: list[dict[int, float]]) -> None:
    """Draw which rank trained which stream at every step, above the losses of both runs."""
    import matplotlib  # noqa: PLC0415  # only the parent draws, and only it should need it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    owner = torch.zeros(ROWS, PHASES[-1][1])
    for line in notes:
        if "tokens" in line:
            owner[line["stream"], line["step"]] = line["rank"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5), sharex=True, height_ratios=[1.1, 1], layout="constrained"
    )
    colors = matplotlib.colors.ListedColormap(["#4063d8", "#389826", "#9558b2", "#cb3c33"])
    top.imshow(owner.numpy(), aspect="auto", cmap=colors, interpolation="nearest", vmin=-0.5, vmax=3.5)
    top.set_ylabel("stream (= row of the batch)")
    top.set_title("Streams change owner, batches do not: rank that trained each row")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colors(rank)) for rank in range(4)]
    figure.legend(patches, [f"rank {rank}" for rank in range(4)], ncols=4, loc="outside lower center")
    start = 0
    for world, last in PHASES:
        bottom.text((start + last) / 2 - 0.5, max(losses[1].values()), f"{world} processes", ha="center", va="top")
        for axis in (top, bottom):
            axis.axvline(last - 0.5, color="black", linewidth=1)
        start = last
    steps = sorted(losses[1])
    bottom.plot(steps, [losses[1][s] for s in steps], color="#bbbbbb", linewidth=5, label="uninterrupted, 1 process")
    bottom.plot(steps, [losses[0][s] for s in steps], color="#cb3c33", linewidth=1.5, label="4 -> 2 -> 3 processes")
    bottom.set_xlabel("step")
    bottom.set_ylabel("loss")
    bottom.legend(loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/rescale").absolute()
    if "--phase" in sys.argv:
        name, last_step, resume = sys.argv[3:6]
        return train(folder, name, int(last_step), resume)
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.jsonl")]:
        old.unlink()
    write_corpus(folder / "topics.jsonl")
    resume = ""
    for world, last_step in PHASES:
        launch(folder, f"{world}-ranks", world, last_step, resume)
        resume = str(folder / f"{world}-ranks.ckpt")
    launch(folder, "whole", 1, PHASES[-1][1], "")
    compare(folder)


if __name__ == "__main__":
    main()
