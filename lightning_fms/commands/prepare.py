"""`fms-data prepare`: text or tokens of a source as litdata chunks that are kept.

The source is cut into units (byte ranges, row groups, files) of about a chunk, and worker processes write the chunks of a unit
each. A unit counts when its chunks are on the disk and its line is in `.prepare/units.jsonl`; `index.json`, without which
nobody takes the folder for a data set, comes last. So a command that was killed goes on where it was when it is given again,
with any number of workers. What it was begun with is in `.prepare/plan.json`: other arguments or changed inputs are refused.
"""

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from litdata.constants import _INDEX_FILENAME
from tqdm import tqdm

from lightning_fms.commands.arguments import add_source_options, size
from lightning_fms.commands.chunks import TOLD, ChunkWriter, Written, kind_of, write_index
from lightning_fms.commands.documents import Span, grouped, spans
from lightning_fms.commands.processes import spread
from lightning_fms.data.sources import DocumentError, Source, open_source
from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.tokenizer import open_tokenizer
from lightning_fms.distributed.commit import sync_folder, write_synced

RECORD = ".prepare"
_VERSION = 1
_LEAST_UNIT, _UNITS = 1 << 20, 64  # small data is cut finer than into chunks, so that many processes have work
_SHOWN = 3
_OF_INPUTS = ("kind", "units")  # arguments that follow from the files, which say better what has changed


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "prepare",
        help="write text or tokens as litdata chunks",
        description="Write the documents of a source, in their natural order, as litdata chunks: tokens if a tokenizer is given, "
        "text otherwise. A run reads them as a source, litdata.StreamingDataset as its own. The same command goes on after it "
        "was killed.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="file, folder, glob or address; all of one format")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="new or empty folder of the chunks")
    add_source_options(parser)
    parser.add_argument("--no-eos", dest="eos", action="store_false", help="do not end tokenized documents with EOS")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (all cores)"
    )
    parser.add_argument(
        "--chunk-bytes", type=size, default=64 << 20, metavar="SIZE", help="most bytes of a chunk (64MiB)"
    )
    parser.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do at a document that cannot be read (raise)",
    )
    parser.set_defaults(run_command=run)


@dataclass(frozen=True)
class Plan:
    """What a folder is made from: arguments that decide its content, and the files, `[name, bytes, version]` each."""

    arguments: dict[str, Any]
    files: list[list[Any]]

    def check(self, former: dict[str, Any], folder: Path) -> None:
        """Raise unless a folder was begun with this plan.

        Raises:
            ValueError: With the first difference.
        """
        self._check_arguments(former, folder, lambda name: name not in _OF_INPUTS)
        then, now = ({entry[0]: entry[1:] for entry in files} for files in (former["files"], self.files))
        changed = [_change(name, then.get(name), now.get(name)) for name in sorted(then.keys() | now.keys())]
        if changed := [change for change in changed if change]:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            counts = f" ({len(then)} files, now {len(now)})" if len(then) != len(now) else ""
            raise ValueError(
                f"--out {folder} was begun with other inputs{counts}: {', '.join(changed[:_SHOWN])}{more}; restore them, or give "
                "another folder"
            )
        self._check_arguments(former, folder, lambda name: name in _OF_INPUTS)

    def _check_arguments(self, former: dict[str, Any], folder: Path, counts: Callable[[str], bool]) -> None:
        for name, now in self.arguments.items():
            then = former["arguments"].get(name)
            if counts(name) and then != now:
                raise ValueError(
                    f"--out {folder} was begun with {name}={then!r}, and now it is {now!r}; give the same arguments again, or "
                    "another folder"
                )


def _change(name: str, then: list[Any] | None, now: list[Any] | None) -> str:
    if then == now:
        return ""
    if then is None or now is None:
        return f"{name} {'is new' if then is None else 'is gone'}"
    return f"{name} had {then[0]:,} bytes and has {now[0]:,}" if then[0] != now[0] else f"{name} was written again"


def run(arguments: argparse.Namespace) -> None:
    """Prepare a source."""
    folder: Path = arguments.out
    if arguments.workers < 1:
        raise ValueError(f"--workers {arguments.workers}: must be at least 1")
    _check_apart(folder, arguments.paths)
    source = open_source(arguments.paths, text_key=arguments.text_key)
    tokenizer = open_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    if tokenizer is not None and arguments.eos and tokenizer.eos_id is None:
        raise ValueError(f"--tokenizer {arguments.tokenizer}: has no EOS token to end documents with; give --no-eos")
    units = _units(source, arguments.chunk_bytes)
    kind = kind_of(source, tokenizer, [span for unit in units for span in unit])
    decides = {
        "version": _VERSION, "text_key": arguments.text_key, "tokenizer": tokenizer and tokenizer.fingerprint,
        "eos": arguments.eos, "chunk_bytes": arguments.chunk_bytes, "kind": kind, "units": len(units),
    }  # fmt: skip
    plan = Plan(decides, _files(source))
    writer = ChunkWriter(source, folder, tokenizer, kind, arguments.eos, arguments.chunk_bytes, arguments.on_error)
    with _held(folder, plan):
        done = _done(folder)
        todo = [unit for unit in range(len(units)) if unit not in done]
        if not todo and (folder / _INDEX_FILENAME).exists():
            print(f"{folder} is complete already: {_summary(list(done.values()), kind)}")
            return
        if done:
            print(f"goes on in {folder}: {len(done)} of {len(units)} units are done", file=sys.stderr)
        _write(writer, units, todo, done, arguments.workers)
        if _files(source) != plan.files:
            plan.check({"arguments": decides, "files": _files(source)}, folder)
        _finish(folder, done, writer)
    print(f"{folder}: {_summary(list(done.values()), kind)}")


def _check_apart(folder: Path, paths: list[str]) -> None:
    for path in paths:
        if "://" not in path and folder.absolute().is_relative_to(Path(path).expanduser().absolute()):
            raise ValueError(
                f"--out {folder}: lies inside {path}, so it would be an input of itself; give a folder elsewhere"
            )


def _units(source: Source, chunk_bytes: int) -> list[list[Span]]:
    least = min(chunk_bytes, max(_LEAST_UNIT, source.listing.total_bytes // _UNITS))
    return grouped(spans(source, least), least)


def _files(source: Source) -> list[list[Any]]:
    reader, names = FileReader(source.listing), source.listing.names
    return [
        [name, int(size), reader.identity(i)[-1]]
        for i, (name, size) in enumerate(zip(names, source.listing.sizes, strict=True))
    ]


@contextmanager
def _held(folder: Path, plan: Plan) -> Iterator[None]:
    """Take the folder for one process, and make sure that it is of this plan.

    Raises:
        ValueError: If it holds something else, or another process writes to it.
    """
    record = folder / RECORD
    if folder.exists() and not record.is_dir() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {folder}: exists and is nothing that this command began; give a new or empty folder")
    record.mkdir(parents=True, exist_ok=True)
    with (record / "lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock, which forked processes would keep
        except OSError:
            raise ValueError(f"--out {folder}: another process is writing to it; wait for it, or end it") from None
        file = record / "plan.json"
        if file.exists():
            plan.check(_read_plan(file), folder)
        else:
            aside = record / ".plan.json"
            write_synced(aside, json.dumps(asdict(plan)).encode())
            aside.replace(file)
            sync_folder(record)
        yield


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        former = json.loads(file.read_text())
        if {"arguments", "files"} <= set(former):
            return former
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{file}: is no plan of this command; give another folder")


def _done(folder: Path) -> dict[int, Written]:
    """Return the units that are written, all of whose chunks are there; forget what was written of others."""
    log = folder / RECORD / "units.jsonl"
    done: dict[int, Written] = {}
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []  # the last line may be torn
    for line in lines:
        try:
            written = Written(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if all(_has(folder / chunk["filename"], chunk["chunk_bytes"]) for chunk in written.chunks):
            done[written.unit] = written
    known = {chunk["filename"] for written in done.values() for chunk in written.chunks}
    for file in [*folder.glob("chunk-*-*.bin"), *folder.glob(".chunk-*-*.bin.*")]:
        if file.name not in known:
            file.unlink(missing_ok=True)
    aside = log.with_name(".units.jsonl")
    write_synced(aside, b"".join(_line(written) for written in done.values()))
    aside.replace(log)
    return done


def _has(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def _line(written: Written) -> bytes:
    return json.dumps(asdict(written)).encode() + b"\n"


def _write(
    writer: ChunkWriter, units: list[list[Span]], todo: list[int], done: dict[int, Written], workers: int
) -> None:
    """Write units, and note each that is on the disk."""
    total = sum(span.stop - span.start for unit in units for span in unit)
    arriving = spread(lambda unit: writer.write(unit, units[unit]), todo, max(1, min(workers, len(todo))))
    told = 0
    with (writer.folder / RECORD / "units.jsonl").open("ab", buffering=0) as log:
        bar: tqdm | None = None
        try:
            for written in arriving:
                if bar is None:  # its thread must not be there when the workers are forked
                    before = sum(unit.source_bytes for unit in done.values())
                    bar = tqdm(total=total, initial=before, unit="B", unit_scale=True, disable=None, desc="prepare")
                sync_folder(writer.folder)
                log.write(_line(written))
                os.fsync(log.fileno())
                done[written.unit] = written
                for what in written.told[: max(0, TOLD - told)]:
                    told += 1
                    tqdm.write(f"left out: {what}", file=sys.stderr)
                bar.update(written.source_bytes)
        finally:
            if bar is not None:
                bar.close()


def _finish(folder: Path, done: dict[int, Written], writer: ChunkWriter) -> None:
    chunks = [chunk for unit in sorted(done) for chunk in done[unit].chunks]
    if not chunks:
        raise DocumentError(
            f"{writer.source.listing.root}: no document has anything in it, so there is nothing to write"
        )
    write_index(folder, chunks, writer.kind, writer.chunk_bytes)


def _summary(done: list[Written], kind: str) -> str:
    chunks = sum(len(written.chunks) for written in done)
    size = sum(chunk["chunk_bytes"] for written in done for chunk in written.chunks)
    count, tokens, empty, skipped = (
        sum(getattr(written, name) for written in done) for name in ("documents", "tokens", "empty", "skipped")
    )
    parts = [f"{count:,} documents"]
    parts += [f"{tokens:,} tokens ({kind})"] if kind != "text" else []
    parts += [f"{chunks:,} chunks, {size / 1e6:,.1f} MB"]
    parts += [f"{empty:,} empty documents left out"] if empty else []
    parts += [f"{skipped:,} documents that cannot be read left out"] if skipped else []
    return ", ".join(parts)
