"""`fms-data` called in this process, and small data for it."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_fms.commands.data import main
from lightning_fms.data.sources import Source, open_source


def call(*words: object) -> int:
    """`fms-data <words>`; its exit code."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """The one line with which `fms-data <words>` is refused."""
    capsys.readouterr()
    assert call(*words) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("fms-data: error: ")
    return said[-1]


def text(number: int) -> str:
    return f"document {number}: " + "wörd " * (number * 37 % 90)


def write_jsonl(folder: Path, count: int = 120, files: int = 3) -> Path:
    folder.mkdir(parents=True)
    for part in range(files):
        lines = [
            json.dumps({"id": n, "text": text(n)}) for n in range(part * count // files, (part + 1) * count // files)
        ]
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_gz(folder: Path, count: int = 120) -> Path:
    folder.mkdir(parents=True)
    for part in range(2):
        lines = [json.dumps({"text": text(n)}) for n in range(part * count // 2, (part + 1) * count // 2)]
        (folder / f"part-{part}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


def write_parquet(folder: Path, count: int = 120) -> Path:
    folder.mkdir(parents=True)
    for part in range(2):
        rows = [text(n) for n in range(part * count // 2, (part + 1) * count // 2)]
        pq.write_table(pa.table({"text": rows}), folder / f"part-{part}.parquet", row_group_size=20)
    return folder


WRITERS = {"jsonl": write_jsonl, "gz": write_gz, "parquet": write_parquet}


def documents_of(folder: Path | Source) -> list[str | list[int]]:
    """What a run reads of a source, in the source's own order."""
    source = folder if isinstance(folder, Source) else open_source(folder)
    found: list[str | list[int]] = []
    for file, size in enumerate(source.listing.sizes.tolist()):
        window = source.window(file, 0, size)
        for start, ref in zip(window.starts.tolist(), window.refs.tolist(), strict=True):
            document = source.read(file, start, ref)
            assert isinstance(document, str | np.ndarray)
            found.append(document if isinstance(document, str) else document.tolist())
    return found
