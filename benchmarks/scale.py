"""A run of 100 trillion tokens on up to 16,384 ranks, from the loader's own code and a manifest of files that do not exist.

    python benchmarks/scale.py                       # a few minutes on 2 cores, under 4 GB of memory; docs/scale.md explains

Ten billion documents of 10,000 tokens, 4 bytes a token: 400 TB in 400,000 files of 1 GB. Each line says whether it was measured
(this process, this machine) or computed from what was measured.
"""

import argparse
import io
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fms.data import StreamLoader, merge_states
from lightning_fms.data.cursor import Columns, State, make_state
from lightning_fms.data.segments import WINDOW_BYTES, SourceOrder
from lightning_fms.data.slots import Slots
from lightning_fms.data.sources import Document, Listing, Window
from lightning_fms.data.sources.blocks import REMOTE_BLOCK
from lightning_fms.data.sources.files import FileReader

TOKENS, DOCUMENTS, FILES, BYTES_A_TOKEN = 100_000_000_000_000, 10_000_000_000, 400_000, 4
SPACING = TOKENS * BYTES_A_TOKEN // DOCUMENTS  # bytes of a document: 40,000
STREAMS, TOKENS_A_SECOND = 16_384, 10_000  # a rank, of an 8B model


class Imagined:
    """Documents of equal size in files that do not exist."""

    holds_tokens = True

    def __init__(self, files: int, documents: int) -> None:
        sizes = np.full(files, documents // files * SPACING, dtype=np.int64)
        self.listing = Listing(Path("imagined"), tuple(f"part-{i:06}.bin" for i in range(files)), sizes)
        self.windows = 0

    def window(self, file: int, start: int, stop: int) -> Window:
        self.windows += 1
        numbers = np.arange(-(-start // SPACING), -(-stop // SPACING))
        return Window((numbers * SPACING - start).astype(np.uint32), np.full(len(numbers), SPACING, np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        return np.full(length // BYTES_A_TOKEN, 7, dtype=np.uint8)


def own_bytes() -> int:
    """Memory of this process alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return what an action returns, and its seconds of processor time: other load on the machine matters little."""
    began = time.process_time()
    result = action()
    return result, time.process_time() - began


def say(what: str, value: str, how: str) -> None:
    """Print a line of the table."""
    print(f"{what:<66} {value:>22}   {how}", flush=True)


def fragments(streams: int) -> SourceOrder:
    """What a process holds of the manifest."""
    before = own_bytes()
    source, seconds = timed(lambda: Imagined(FILES, DOCUMENTS))
    say("listing in memory, files", f"{FILES:,}", "given")
    order, more = timed(lambda: SourceOrder(source, "web", 0, streams))
    say("fragments", f"{len(order.size):,}", "measured")
    _, first = timed(lambda: order.segment(0, 0, 4096))
    say("seconds to open listing, fragments and the first epoch's line", f"{seconds + more + first:.2f} s", "measured")
    _, segment = timed(lambda: [order.segment(stream, 0, 4096) for stream in range(64)])
    say("seconds a segment, of a stream's next epoch in the same line", f"{segment / 64 * 1e3:.2f} ms", "measured")
    say("memory a process, three epochs' lines held", f"{_after_epochs(order, before) / 1e6:,.0f} MB", "measured")
    return order


def _after_epochs(order: SourceOrder, before: int) -> int:
    for epoch in range(3):
        order.segment(0, epoch, 4096)
    return own_bytes() - before


def window(order: SourceOrder, streams: int, sources: int) -> None:
    """What a stream holds, and what is open."""
    segment = order.segment(0, 0, 4096)
    _, seconds = timed(lambda: segment.find(0))
    say("windows of a segment", f"{segment.windows:,}", "measured")
    say("seconds to find the documents of a window, beside reading it", f"{seconds * 1e3:.2f} ms", "measured")
    kept = sum(
        part.starts.nbytes + part.refs.nbytes + part.order.nbytes for part in segment._parts if hasattr(part, "order")
    )
    say("offsets that a stream holds, bytes", f"{kept:,}", "measured")
    keep_open = FileReader(order.source.listing)._keep_open
    say(f"files open in a process, at most, {sources} sources", f"{keep_open * sources}", "computed: 64 a source")
    for ranks in (1024, 16_384):
        say(f"streams a rank, {ranks:,} ranks", f"{-(-streams // ranks):,}", "computed: S / ranks")


def state(streams: int, sources: int) -> None:
    """Size of the state, and the time that gathering and saving it take."""
    columns = Columns([f"source-{i}" for i in range(sources)])
    header: dict[str, Any] = StreamLoader({"a": Imagined(1, 1000)}, 16, 1).state_dict()["header"]
    header = {**header, "num_streams": streams, "sources": columns.sources}
    rows = columns.fresh(streams, 4096)
    rows[:, columns.position] = np.random.default_rng(0).integers(1 << 40, size=(streams, sources))
    for ranks in (1024, 16_384):
        parts: list[State] = [
            make_state(header, owned := Slots(streams, streams, ranks, rank).owned(), rows[owned])
            for rank in range(ranks)
        ]
        message = len(_saved(parts[0]))
        merged, seconds = timed(lambda parts=parts: merge_states(parts))
        data, save = timed(lambda merged=merged: _saved(merged))
        say(f"state a rank as a message, {ranks:,} ranks", f"{message:,} B", "measured")
        say(f"merge of {ranks:,} parts", f"{seconds:.2f} s", "measured")
        say(
            f"gather of {ranks:,} parts at 10 GB/s a rank",
            f"{message * ranks / 10e9 * 1e3:.1f} ms",
            "computed: bytes / bandwidth",
        )
    say(f"state of {streams:,} streams, {sources} sources", f"{len(data) / 1e6:.2f} MB", "measured")
    say("save to memory", f"{save * 1e3:.1f} ms", "measured")
    loaded, load = timed(lambda: torch.load(io.BytesIO(data), weights_only=True))
    assert torch.equal(loaded["rows"], merged["rows"])
    say("load", f"{load * 1e3:.1f} ms", "measured")


def _saved(state: State) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def requests(streams: int) -> None:
    """Requests to a remote store, if nothing is cached: a block a window, as windows are read one after the other."""
    assert WINDOW_BYTES == REMOTE_BLOCK
    for ranks in (1024, 16_384):
        speed = ranks * TOKENS_A_SECOND * BYTES_A_TOKEN
        say(
            f"bytes a second of all, {ranks:,} ranks of {TOKENS_A_SECOND:,} tokens/s",
            f"{speed / 1e9:.2f} GB/s",
            "computed",
        )
        say(
            f"remote requests a second of all, {ranks:,} ranks", f"{2 * speed / REMOTE_BLOCK:,.0f}",
            "computed: two blocks a window",
        )  # fmt: skip


def skew(streams: int, lengths: str) -> None:
    """How far apart streams end their first epoch; real cuts, document lengths drawn."""
    generator = np.random.default_rng(0)
    source = Imagined(4096, 4096 * 25_000)
    order = SourceOrder(source, "web", 0, streams)
    documents = np.array([_documents(order, stream) for stream in range(0, streams, max(1, streams // 256))])
    tokens = np.array([_tokens(generator, int(count), lengths) for count in documents])
    spread = (tokens.max() - tokens.min()) / tokens.mean()
    say(
        f"epoch skew, {streams:,} streams, {int(documents.mean()):,} documents each, {lengths} lengths",
        f"{spread:.2%}", "measured cuts, lengths simulated",
    )  # fmt: skip
    if streams == STREAMS:
        whole = DOCUMENTS / streams
        say(
            f"the same with all: {whole:,.0f} documents each", f"{spread * (documents.mean() / whole) ** 0.5:.2%}",
            "computed: falls with the root of the documents",
        )  # fmt: skip


def _documents(order: SourceOrder, stream: int) -> int:
    segment = order.segment(stream, 0, 4096)
    return sum(
        -(-stop // SPACING) + -start // SPACING for start, stop in zip(segment._starts, segment._stops, strict=True)
    )


def _tokens(generator: np.random.Generator, count: int, lengths: str) -> float:
    """Tokens of documents that together have the bytes of a segment: what varies is the tokens a byte has."""
    if lengths == "equal":
        return float(count)
    return float(generator.lognormal(0, 0.25, size=count).sum())


def shuffle(order: SourceOrder, streams: int, batches: int) -> None:
    """Files within a window of batches, against the most that there could be."""
    seen: list[int] = []
    for stream in range(0, streams, max(1, streams // 4096)):
        segment = order.segment(stream, 0, 4096)
        position = 0
        for _ in range(batches):
            found = segment.find(position)
            assert found is not None
            seen.append(found[1])
            position = found[0] + 1
    counts = np.unique(seen, return_counts=True)[1]
    entropy = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    random = np.unique(np.random.default_rng(0).integers(FILES, size=len(seen)), return_counts=True)[1]
    ideal = -(random / random.sum() * np.log(random / random.sum())).sum()
    say(
        f"entropy of the file in {batches} steps, 4,096 of {streams:,} streams", f"{entropy / ideal:.3f} of random",
        "measured",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=STREAMS, help="rows of a global batch, and most ranks")
    parser.add_argument("--sources", type=int, default=4)
    args = parser.parse_args()
    say("tokens; documents; bytes", f"{TOKENS:.0e}; {DOCUMENTS:.0e}; {TOKENS * BYTES_A_TOKEN / 1e12:.0f} TB", "given")
    order = fragments(args.streams)
    window(order, args.streams, args.sources)
    state(args.streams, args.sources)
    requests(args.streams)
    for streams, lengths in itertools.product((1024, args.streams), ("equal", "log-normal")):
        skew(streams, lengths)
    for batches in (1, 16):
        shuffle(order, args.streams, batches)


if __name__ == "__main__":
    main()
