"""Runs of the loader that change their number of ranks, workers, micro-batches and rows a step on the way."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import litdata
import torch

from lightning_fms.data import State, StreamLoader, merge_states
from lightning_fms.data.loader import MicroBatch
from lightning_fms.data.packing import IGNORE

FIELDS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True)
class Phase:
    """A part of a run: W ranks with `workers` processes each, B rows a step, at most `micro` rows a micro-batch."""

    world: int
    batch: int
    micro: int | None
    steps: int
    workers: int = 0
    context: str = "fork"


def document(source: str, number: int) -> str:
    """A text that says which document it is, of a length that varies a lot."""
    return f"{source}{number}:" + "".join(chr(97 + (number * 7 + i) % 26) for i in range(number * 37 % 90))


def write_jsonl(folder: Path, source: str, count: int, files: int = 3) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(files):
        records = [json.dumps({"text": document(source, n)}) + "\n" for n in range(part, count, files)]
        (folder / f"{source}-{part}.jsonl").write_text("".join(records))
    return folder


def _encode(numbers: range) -> Iterator[torch.Tensor]:
    for number in numbers:
        yield torch.tensor([*document("l", number).encode(), 256], dtype=torch.int32)


def write_litdata(folder: Path, count: int) -> Path:
    litdata.optimize(
        fn=_encode, inputs=[range(0, count // 2), range(count // 2, count)], output_dir=str(folder), chunk_bytes=2000,
        item_loader=litdata.TokensLoader(block_size=16), num_workers=1, start_method="fork", verbose=False,
    )  # fmt: skip
    return folder


def through_disk(state: State) -> State:
    """Save and load a state the way a checkpoint does, without executing pickled code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run_phase(options: dict, phase: Phase, state: State | None, first_row: int) -> tuple[dict[int, tuple], State]:
    """Run all ranks of a phase in this process; return its rows by number, and the merged state."""
    loaders = [
        StreamLoader(
            **options, global_batch_size=phase.batch, micro_batch_size=phase.micro, rank=rank, world_size=phase.world,
            num_workers=phase.workers, multiprocessing_context=phase.context if phase.workers else None, state=state,
        )
        for rank in range(phase.world)
    ]  # fmt: skip
    streams = loaders[0].slots.streams
    rows: dict[int, tuple] = {}
    iterators = [loader.micro_batches() for loader in loaders]
    for step in range(phase.steps):
        start = first_row + step * phase.batch
        for rank, (loader, micros) in enumerate(zip(loaders, iterators, strict=True)):
            expected = [row for row in range(start, start + phase.batch) if row % streams % phase.world == rank]
            for part in loader.slots.split(len(expected)):
                micro = next(micros)
                for row, content in zip(expected[part], _contents(micro, part.stop - part.start), strict=True):
                    rows[row] = content
            assert micro.last
            loader.apply(micro.step)
    merged = merge_states([loader.state_dict() for loader in loaders])
    for loader in loaders:
        loader.close()
    return rows, merged


def _contents(micro: MicroBatch, count: int) -> list[tuple]:
    """Return the fields of a micro-batch's `count` rows; what it shows where it has nothing to learn from is left out."""
    batch = micro.batch
    names = FIELDS if "input_ids" in batch else tuple(sorted(set(batch) - {"row_valid"}))
    assert batch["row_valid"].tolist() == [micro.targets > 0 and i < count for i in range(len(batch["row_valid"]))]
    if not micro.targets and "labels" in batch:
        batch["labels"][:] = IGNORE
    return [tuple(batch[name][index].numpy().tobytes() for name in names) for index in range(count)]


def two_sources(root: Path) -> dict[str, Path]:
    """Sixty documents of one kind and thirty of another."""
    return {"p": write_jsonl(root / "p", "p", 60), "c": write_jsonl(root / "c", "c", 30)}
