"""`fms-data audit`: which documents were in a step, the first question after a loss spike.

The rows of a step are made again from the nearest state before it. A state counts its rows, so two of them tell how many rows a
step had in between, also where the run was gone on with a changed `global_batch_size`.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fms.commands.documents import is_decoded
from lightning_fms.data.audit import Reading, readings
from lightning_fms.data.loader import StreamLoader
from lightning_fms.data.sources import DocumentError
from lightning_fms.tables import table

if TYPE_CHECKING:
    from lightning_fms.commands.runs import Kept

_SHOWN, _TOKENS = 72, 64  # characters and tokens of a document's beginning


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "audit",
        help="which documents a training step has seen",
        description="List the documents of one global batch of a run, from the state that the callback DataTrail, or a checkpoint, "
        "kept before it. Tokens a..b of a document are those in the row, b not included. Paths in the run's config are taken from "
        "the current folder, as they were for the run.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="folder of the run, <root>/<name>/<number>")
    parser.add_argument(
        "--step",
        type=int,
        required=True,
        metavar="T",
        help="the batch, counted from 0 as loggers do: step-T is the state before it",
    )
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a source that the step had and the run's last config has not, or has elsewhere; may be repeated",
    )
    parser.add_argument("--jsonl", action="store_true", help="a JSON object a line instead of a table")
    parser.add_argument("--text", action="store_true", help="show how each document begins")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> None:
    """List the documents of a step."""
    # Lightning and Hydra take seconds to import, which the other commands need not wait for.
    from lightning_fms.commands.runs import around, open_run  # noqa: PLC0415

    if arguments.step < 0:
        raise ValueError(f"--step {arguments.step}: steps are counted from 0")
    if wrong := [given for given in arguments.source if "=" not in given]:
        raise ValueError(f"--source {wrong[0]}: give it as NAME=PATH")
    cfg, module = open_run(arguments.run, dict(given.split("=", 1) for given in arguments.source))
    before, after = around(arguments.run, cfg, arguments.step)
    batch, note = rows_a_step(before, after, int(cfg.data.global_batch_size))
    first = before.row + (arguments.step - before.step) * batch
    loader = module.loader_at(before.state)
    print(
        f"step {arguments.step}: rows {first} to {first + batch - 1} ({batch} a step{note}), from {before.file}",
        file=sys.stderr,
    )
    found = readings(loader, first, first + batch)
    if arguments.jsonl:
        for reading in found:
            entry = {"step": arguments.step, **asdict(reading)}
            print(json.dumps({**entry, "text": beginning(loader, reading)} if arguments.text else entry))
        return
    heads = ["row", "source", "epoch", "file", "document", "tokens"] + (["text"] if arguments.text else [])
    lines = [_line(loader, reading, arguments.text) for reading in found]
    print("\n".join(table(heads, lines, right=("row", "epoch", "document", "tokens"))))


def rows_a_step(before: "Kept", after: "Kept | None", configured: int) -> tuple[int, str]:
    """Return the rows of each step between two states, and what is to be said of that.

    Args:
        before: A state.
        after: A later one, if there is any.
        configured: The config's `global_batch_size`, taken where no later state says.

    Raises:
        ValueError: If the number changed between the states.
    """
    if after is None:
        return (
            configured,
            f" by the config: no state after step {before.step} says how many, or that the run came so far",
        )
    steps, rows = after.step - before.step, after.row - before.row
    if rows <= 0 or rows % steps:
        raise ValueError(
            f"steps {before.step} to {after.step} had {rows} rows together ({before.file.name}, {after.file.name}): "
            "global_batch_size changed in between, and nothing tells when; ask for a step before or behind these"
        )
    return rows // steps, ""


def _line(loader: StreamLoader, reading: Reading, with_text: bool) -> list[str]:
    source = loader.sources[reading.source]
    file = source.listing.names.index(reading.file)
    place = f"row {reading.ref}" if is_decoded(source, file) else f"byte {reading.start}"
    tokens = f"{reading.first_token}..{reading.first_token + reading.tokens}"
    line = [str(reading.row), reading.source, str(reading.epoch), reading.file, place, tokens]
    return [*line, repr(beginning(loader, reading))[1:-1]] if with_text else line


def beginning(loader: StreamLoader, reading: Reading) -> str:
    """Return how a document begins, as text."""
    source = loader.sources[reading.source]
    try:
        document = source.read(source.listing.names.index(reading.file), reading.start, reading.ref)
    except DocumentError as error:
        return f"cannot be read: {error}"
    if isinstance(document, np.ndarray):
        document = loader.tokenizer.decode(document[:_TOKENS])
    text = document if isinstance(document, str) else f"{str(document)[: 2 * _SHOWN]}"
    return text[:_SHOWN]
