"""Double entry for documents: what a run's rows are made of, held against the files.

The audit says which stretch of which document a row holds. The ledger looks the document up among those that were found
without the loader, tokenizes it by itself, checks the row against that, and keeps what was used of every document of every
epoch. At the end each document of a finished epoch must have been used from its first token to its last, in one go.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer as HfTokenizer

from lightning_fms.data import State, StreamLoader
from lightning_fms.data.audit import readings
from lightning_fms.data.cursor import Columns
from tests.data.chains import Phase, run_phase, through_disk
from tests.data.corpora import Corpus

Key = tuple[str, int, int]
"""Source, epoch, and number of the document in its corpus."""


def item_reader(item: Any) -> dict | None:
    """A row for `packing="none"`: which item it is made of."""
    document = plain(item)
    return {"digest": np.int64(digest(document))} if document else None


def plain(document: Any) -> str | list[int]:
    """The text of a document or record, or its token ids as a list."""
    if isinstance(document, Mapping):
        return document["text"]
    return document if isinstance(document, str) else np.asarray(document).tolist()


def digest(document: str | list[int]) -> int:
    return crc32(str(document).encode())


@dataclass
class Ledger:
    """Follows a chain of runs.

    used: tokens used of each document so far. length: its tokens under the settings of the last run that read it.
    lost: documents whose rest is given up, since a resume. short: those that became shorter than what was used of them, at
    a resume; when their stream makes its next row they are over, unless settings have changed again.
    """

    corpora: Mapping[str, Corpus]
    used: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    length: dict[Key, int] = field(default_factory=dict)
    lost: set[Key] = field(default_factory=set)
    short: set[Key] = field(default_factory=set)
    over: set[Key] = field(default_factory=set)
    stream: dict[Key, int] = field(default_factory=dict)
    state: State | None = None
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._number = {
            name: {str(document): i for i, document in enumerate(corpus.documents)}
            for name, corpus in self.corpora.items()
        }
        self._ids: dict[tuple, list[int]] = {}

    @property
    def row(self) -> int:
        return self.state["header"]["row"] if self.state else 0

    def run(self, options: dict, phase: Phase) -> None:
        """Run a phase and enter its rows; `options["sources"]` are names."""
        given = {**options, "sources": {name: self.corpora[name].spec for name in options["sources"]}}
        if options.get("packing") == "none":
            given |= {"reader": item_reader, "seq_len": None, "max_document_tokens": None, "bos": False}
        auditor = StreamLoader(**given, global_batch_size=phase.batch, state=self.state)
        if self.state:
            self._resume(options, auditor)
        first, stop = self.row, self.row + phase.batch * phase.steps
        rows, state = run_phase(given, phase, self.state, first)
        made: dict[int, list[int]] = {row: [] for row in range(first, stop)}
        for reading in readings(auditor, first, stop):
            source = auditor._sources[reading.source]
            document = plain(source.read(source.listing.names.index(reading.file), reading.start, reading.ref))
            key = reading.source, reading.epoch, self._number[reading.source][str(document)]
            made[reading.row] += self._enter(key, options, reading.first_token, reading.tokens)
            self.stream[key] = reading.row % options["num_streams"]
        for row, tokens in made.items():
            dtype = np.int64
            assert np.trim_zeros(np.frombuffer(rows[row][0], dtype), "b").tolist() == np.trim_zeros(tokens, "b")
        moved = {row % options["num_streams"] for row in made}
        self.over |= {key for key in self.short if self.stream[key] in moved}
        self.short -= self.over
        self.state, self.options = through_disk(state), options

    def _enter(self, key: Key, options: dict, first: int, count: int) -> list[int]:
        tokens = self.tokens(key, options)
        assert key not in self.lost | self.over, f"{key} goes on although its rest was given up"
        assert first == self.used[key], f"{key} goes on at token {first}, and {self.used[key]} were used"
        self.used[key] += count
        self.length[key] = len(tokens)
        assert 0 < self.used[key] <= len(tokens)
        return tokens[first : first + count]

    def _resume(self, options: dict, loader: StreamLoader) -> None:
        """Close the documents that cannot go on under new settings; the loader must count the same ones."""
        before, lost = self.options, set()
        others = any(options.get(name) != before.get(name) for name in ("tokenizer", "bos"))
        others |= (options.get("packing") == "none") != (before.get("packing") == "none")
        for key, used in self.used.items():
            if key in self.lost or key in self.over or used == self.length[key]:
                continue
            self.short.discard(key)
            if others or key[0] not in options["sources"]:
                lost.add(key)
            elif used >= len(self.tokens(key, options)):
                self.short.add(key)
        assert loader.skipped_documents == len(lost)
        self.lost |= lost

    def tokens(self, key: Key, options: dict) -> list[int]:
        """Tokenize a document as the settings say, without the loader."""
        document = self.corpora[key[0]].documents[key[2]]
        if options.get("packing") == "none":
            return [digest(document)] if document else []
        tokenizer = options.get("tokenizer", "bytes")
        at = (*key[::2], str(tokenizer))
        if at not in self._ids:
            self._ids[at] = _ids(document, tokenizer)
        bos, eos = _special(tokenizer)
        ids = self._ids[at][: options.get("max_document_tokens")]
        head = [bos] if options.get("bos") and ids[:1] != [bos] else []
        tail = [eos] if options.get("eos", True) and ids[-1:] != [eos] else []
        return [*head, *ids, *tail] if ids else []

    def epochs(self) -> dict[str, int]:
        """Return the epoch of each source's slowest stream: all before it are over."""
        assert self.state is not None
        names = self.state["header"]["sources"]
        epochs = self.state["rows"].numpy()[:, Columns(names).epoch]
        return dict(zip(names, epochs.min(axis=0).tolist(), strict=True))

    def close(self) -> None:
        """Check every document of every epoch that is over, and what was counted as given up."""
        assert self.state is not None
        for name, epochs in self.epochs().items():
            for epoch in range(epochs):
                for number, document in enumerate(self.corpora[name].documents):
                    key = name, epoch, number
                    whole = key in self.length and self.used[key] == self.length[key]
                    over = whole or key in self.lost or key in self.over or not document
                    assert over, f"{key}: {self.used[key]} of {self.length.get(key)}"
        skipped = self.state["rows"].numpy()[:, Columns(self.state["header"]["sources"]).skipped]
        assert skipped.sum() == len(self.lost)


def _ids(document: Any, tokenizer: Any) -> list[int]:
    if isinstance(document, list):
        return document
    if isinstance(tokenizer, str) and tokenizer != "bytes":
        return HfTokenizer.from_file(tokenizer).encode(document, add_special_tokens=False).ids
    return list(document.encode())


def _special(tokenizer: Any) -> tuple[int | None, int | None]:
    if isinstance(tokenizer, str) and tokenizer != "bytes":
        saved = HfTokenizer.from_file(tokenizer)
        return saved.token_to_id("<s>"), saved.token_to_id("<|endoftext|>")
    return getattr(tokenizer, "bos_id", None), 256
