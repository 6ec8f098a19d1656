"""Damage to files, and what a loader may make of it: an error of the documented kind, and never an inexact position.

A case is a corpus of one format, of which one file gets a few bytes flipped, cut out or put in (`damage`), or is cut, replaced or
removed while a loader reads (`change`). Everything follows from the format and the case's number, so a failure can be run again:

    MUTATIONS=5000 pytest tests/data/test_mutations.py -k parquet          # so many cases of a format
    python -m tests.data.mutations parquet 1234                            # one case, in this process
"""

import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
from litdata.streaming.writer import BinaryWriter

from lightning_fms.data import StreamLoader, segments
from lightning_fms.data.sources import DocumentError, decoded, listing, open_source, token_files, units
from lightning_fms.data.sources import lines as line_files
from tests.data import corpora
from tests.data.chains import through_disk
from tests.data.cuts import read_all
from tests.data.ledger import digest, item_reader, plain

FORMATS = (
    "jsonl", "text", "gz", "zst", "parquet", "arrow", "litdata", "litdata text", "litdata rows", "megatron", "bin", "llm.c",
)  # fmt: skip
STREAMS, BATCH, ROWS = 4, 3, 16
_DOCUMENTS = 60
_HANG = 20  # seconds
_ALL = 10_000  # more than there are


# -- corpora ------------------------------------------------------------------------------------------------------------


def write(folder: Path, kind: str) -> dict[str, Any]:
    """Write a corpus of three files or more; return the options of its source, without the path."""
    if kind in corpora.FORMATS:
        spec = corpora.write(folder, kind, "m", _DOCUMENTS).spec
        return {key: value for key, value in spec.items() if key not in ("path", "cache")}
    if kind == "zst":
        corpora.write(folder, "jsonl", "m", _DOCUMENTS)
        for path in list(folder.iterdir()):
            with pa.CompressedOutputStream(str(path) + ".zst", "zstd") as out:
                out.write(path.read_bytes())
            path.unlink()
        return {}
    folder.mkdir()
    if kind == "litdata rows":
        writer = BinaryWriter(str(folder), chunk_size=12)
        for number in range(_DOCUMENTS):
            writer[number] = {"id": number, "text": corpora.text_of("m", number)}
        writer.done()
        writer.merge(1)
        return {}
    for part in range(3):
        ids = [
            t
            for n in range(part, _DOCUMENTS, 3)
            if (text := corpora.text_of("m", n))
            for t in (corpora.EOS, *text.encode())
        ]
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, len(ids)
        (folder / f"{part}.bin").write_bytes(header.tobytes() + np.array(ids, dtype=np.uint16).tobytes())
    return {"bos_id": corpora.EOS}


# -- damage ---------------------------------------------------------------------------------------------------------------


def damage(path: Path, rng: np.random.Generator) -> None:
    """Flip, cut out or put in bytes at one to three places of a file."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 4)):
        at = _place(len(data), rng)
        count = int(rng.integers(1, rng.choice([2, 9, 200])))
        kind = rng.choice(["bit", "bytes", "cut", "insert", "repeat", "end", "zero"])
        if kind == "bit" and data:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == "bytes":
            data[at : at + count] = rng.bytes(len(data[at : at + count]))
        elif kind == "zero":
            data[at : at + count] = bytes([int(rng.choice([0, 255]))]) * len(data[at : at + count])
        elif kind == "cut":
            del data[at : at + count]
        elif kind == "insert":
            data[at:at] = rng.bytes(count)
        elif kind == "repeat":
            data[at:at] = data[at : at + count]
        else:
            del data[at:]
    path.write_bytes(data)


def _place(size: int, rng: np.random.Generator) -> int:
    """A place in a file: one in three near its ends, where formats say what they hold."""
    if size == 0:
        return 0
    at, near = int(rng.integers(size)), int(rng.integers(min(size, 80)))
    return [at, at, near, size - 1 - near][rng.choice(4, p=[1 / 3, 1 / 3, 1 / 6, 1 / 6])]


def change(path: Path, rng: np.random.Generator) -> None:
    """Do what may happen to a file while somebody reads it."""
    kind = rng.choice(["truncate", "empty", "remove", "folder", "rewrite", "replace", "grow", "damage"])
    data = path.read_bytes()
    if kind == "truncate":
        os.truncate(path, int(rng.integers(len(data))))
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "remove":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "rewrite":  # in place: whoever has it open sees it
        path.write_bytes(rng.bytes(len(data)))
    elif kind == "replace":
        aside = path.with_name(".aside")
        aside.write_bytes(rng.bytes(int(rng.integers(1, 2 * len(data)))))
        aside.rename(path)
    elif kind == "grow":
        path.write_bytes(data + data[: len(data) // 2])
    else:
        damage(path, rng)


# -- cases ----------------------------------------------------------------------------------------------------------------


class Case:
    """A corpus in a folder of its own, ready to be damaged."""

    def __init__(self, pristine: Path, work: Path, kind: str, options: dict, number: int) -> None:
        self.folder, self.work, self.options = work / "corpus", work, options
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(pristine, self.folder)
        self.rng = np.random.default_rng([crc32(kind.encode()), number])
        files = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        self.victim = files[int(self.rng.integers(len(files)))]

    def loader(self, **options: Any) -> StreamLoader:
        source = {"path": self.folder, "cache": self.work / "cache", **self.options}
        return StreamLoader(**{
            "sources": {"m": source}, "seq_len": 24, "global_batch_size": BATCH, "num_streams": STREAMS, "on_error": "skip",
            "shuffle_window": 4, **options,
        })  # fmt: skip

    def items(self, **options: Any) -> StreamLoader:
        return self.loader(packing="none", seq_len=None, reader=item_reader, one_pass=True, **options)

    def unharmed(self) -> list[int]:
        """Digests of the documents in files that stay as they are; none where an index of all is the victim."""
        if self.victim.name == "index.json":
            return []
        source = open_source(self.folder, cache=self.work / "cache", **self.options)
        name = self.victim.name.replace(".idx", ".bin")
        files = [i for i, other in enumerate(source.listing.names) if other != name]
        texts = [plain(document) for file in files for document in read_all(source, file=file)]
        return [digest(text) for text in texts if text]


def examine(case: Case) -> str:
    """Damage a file, and read the corpus in every way; return what happened, in a word."""
    expected = case.unharmed()
    shutil.rmtree(case.work / "cache", ignore_errors=True)
    damage(case.victim, case.rng)
    if error := _error(case.loader, ValueError):  # whatever `on_error` says: there is no run without its sources
        assert "source 'm'" in error, error
        return "refused"
    error = _error(lambda: list(_digests(case.items(on_error="raise"), _ALL)), DocumentError)
    if error:
        assert error.startswith("source 'm': "), error
        assert str(case.folder) in error, error
    _resumes(case)
    _once(case, expected, lambda: None)
    return "error" if error else "read"


def examine_change(case: Case) -> str:
    """Change a file while a loader reads, and go on."""
    expected = case.unharmed()
    _once(case, expected, lambda: change(case.victim, case.rng), listings=case.work / "listings")
    return "read"


def _error(action: Callable[[], object], kind: type[ValueError]) -> str:
    """Return the message of an error of a kind; nothing, if there is none."""
    message = ""
    try:
        action()
    except kind as error:
        message = str(error)
    assert "\n" not in message, message
    return message


def _rows(loader: StreamLoader, count: int) -> list[bytes]:
    return [batch["input_ids"].numpy().tobytes() for batch in islice(loader, count)]


def _resumes(case: Case) -> None:
    """A state taken anywhere makes the rows that follow."""
    whole, first = case.loader(), int(case.rng.integers(ROWS))
    rows: list[bytes] = []
    if error := _error(lambda: rows.extend(_rows(whole, ROWS)), ValueError):
        assert "no document with a token in" in error, error
        return
    part = case.loader()
    assert _rows(part, first) == rows[:first]
    again = case.loader(state=through_disk(part.state_dict()))
    assert _rows(again, ROWS - first) == rows[first:]
    assert str(again.state_dict()) == str(whole.state_dict())


def _once(case: Case, expected: list[int], between: Callable[[], None], **options: Any) -> None:
    """Documents of unharmed files come once, through a change and a resume; all ends."""
    loader = case.items(**options)
    found = list(_digests(loader, int(case.rng.integers(1, 20))))
    between()
    found += _digests(loader, int(case.rng.integers(1, 20)))
    state = through_disk(loader.state_dict())
    if case.victim.suffix in (".json", ".idx") and _error(lambda: case.items(state=state, **options), ValueError):
        return  # what says where the documents of a source are has to be there
    found += _digests(case.items(state=state, **options), _ALL)
    counts = Counter(found)
    wrong = {item: counts[item] for item in expected if counts[item] != 1}
    assert not wrong, (
        f"{len(wrong)} of {len(expected)} documents of unharmed files came {Counter(wrong.values())} times"
    )


def _digests(loader: StreamLoader, batches: int) -> Iterator[int]:
    empty = 0
    for batch in islice(loader, batches):
        valid = batch["row_valid"]
        yield from batch["digest"][valid].tolist() if valid.any() else ()
        empty = 0 if valid.any() else empty + 1
        if empty == STREAMS:  # so that each stream has made an empty row
            break


# -- in a process of its own ------------------------------------------------------------------------------------------------


def shrink(patch: Any) -> None:
    """Make everything small that a file is cut into, so that small files have many of them."""
    patch.setattr(segments, "WINDOW_BYTES", 512)
    patch.setattr(listing, "FRAGMENT_BYTES", 1024)
    patch.setattr(line_files, "BLOCK_BYTES", corpora.BLOCK)
    patch.setattr(decoded, "UNIT_BYTES", 600)
    patch.setattr(units, "CHUNK_BYTES", 700)
    patch.setattr(token_files, "_LOOK_AHEAD", 100)


def run_cases(kind: str, numbers: range, work: Path, changes: bool) -> Counter:
    """Run cases in a forked process, so that a signal is seen; another goes on behind one that dies or hangs.

    Returns:
        What happened, in words, and how often; failures name the case.
    """
    options, seen = write(work / "pristine", kind), Counter[str]()
    first = numbers.start
    while first < numbers.stop:
        note = work / "note"
        note.write_text("")
        child = os.fork()
        if child == 0:
            _child(kind, range(first, numbers.stop), work, options, note, changes)
        _, status = os.waitpid(child, 0)
        lines = [json.loads(line) for line in note.read_text().splitlines()]
        seen.update(line["what"] for line in lines if "what" in line)
        first = lines[-1]["case"] + 1 if lines else numbers.stop
        if status:
            ended = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else f"exit {status}"
            seen[f"FAILED {kind} {first - 1}: {ended} {(work / 'trace').read_text()[-2000:]}"] += 1
    return seen


def _child(kind: str, numbers: range, work: Path, options: dict, note: Path, changes: bool) -> None:
    """Run cases, note what becomes of each, and leave."""
    with note.open("a", buffering=1) as out, (work / "trace").open("w") as trace:
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGALRM, trace, chain=True)
        for number in numbers:
            out.write(json.dumps({"case": number}) + "\n")
            signal.alarm(_HANG)  # ends the process
            try:
                case = Case(work / "pristine", work / "case", kind, options, number)
                what = examine_change(case) if changes else examine(case)
            except BaseException:
                what = f"FAILED {kind} {number}: {traceback.format_exc(limit=-6)}"
            out.write(json.dumps({"case": number, "what": what}) + "\n")
        faulthandler.disable()
    os._exit(0)


def main() -> None:
    """Run one case here."""
    kind, number, changes = sys.argv[1], int(sys.argv[2]), "change" in sys.argv[3:]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        shrink(patch)
        options = write(Path(name, "pristine"), kind)
        case = Case(Path(name, "pristine"), Path(name, "case"), kind, options, number)
        print(examine_change(case) if changes else examine(case))


if __name__ == "__main__":
    main()
