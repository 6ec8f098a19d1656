"""A compressed file holds the documents of the plain one, each once for any cut, and is decoded once."""

import gzip
import json
import os
import pickle
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.sources import Cache, DocumentError, JsonLines, Source, Text, open_source
from lightning_fms.data.sources import lines as lines_module
from lightning_fms.data.sources.lines import BLOCK_BYTES
from tests.data.cuts import documents, read_all


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    suffix = path.suffix
    path.write_bytes(compress(data, suffix) if suffix in (".gz", ".zst") else data)
    return path


def records(*values: object) -> bytes:
    return b"".join(json.dumps({"text": value}).encode() + b"\n" for value in values)


ODD = ["plain", "a\u2028b\u2029c", "next\x85line", "new\nline\r\ncarriage\rreturn", "", "ü€😀", " ", "half \ud83d pair"]
RAW = json.dumps({"text": "u \u2028 v \x85"}, ensure_ascii=False).encode()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(records(*ODD), id="odd characters"),
        pytest.param(RAW + b"\n" + RAW, id="U+2028 unescaped, no final newline"),
        pytest.param(records(*ODD).replace(b"\n", b"\r\n"), id="CRLF"),
        pytest.param(b"\xef\xbb\xbf" + records(*ODD), id="byte-order mark"),
        pytest.param(b"\xef\xbb\xbf\n\n\r\n" + records("a") + b" \t\n\n" + records("b") + b"\n", id="empty lines"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_json_lines_are_those_of_the_plain_file(tmp_path: Path, data: bytes, suffix: str) -> None:
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain", "a.jsonl", data or b"\n")
    source = open_source(write(tmp_path, f"a.jsonl{suffix}", data), cache=tmp_path / "cache")
    expected = read_all(JsonLines(tmp_path / "plain"))
    for cut in range(int(source.listing.sizes[0])):
        assert read_all(source, [cut]) == expected
    assert read_all(source, list(range(200))) == expected


pieces = st.lists(st.sampled_from(["a", "bc", "\n", "\r", "\r\n", "\u2028", "ü", "\x85", " "]), max_size=40)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(pieces.map("".join), st.booleans(), st.sampled_from(["line", "block"]), st.lists(st.integers(1, 80), max_size=5))
def test_text_is_that_of_the_plain_file(content: str, marked: bool, split: str, cuts: list[int]) -> None:
    data = b"\xef\xbb\xbf" * marked + content.encode()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", 8)
        patch.setattr(lines_module, "_STREAM_BLOCK", 5)
        folder = Path(name)
        source = open_source(write(folder, "a.txt.gz", data), split=split, cache=folder / "cache")
        plain = write(folder, "a.txt", data or b"\n")
        expected = read_all(Text(plain, split)) if data else []  # type: ignore[arg-type]
        assert read_all(source, cuts) == expected


def test_large_text_is_cut_where_the_plain_file_is(tmp_path: Path) -> None:
    rng = random.Random(0)
    lengths = [0, 20, 80, 3 * BLOCK_BYTES, BLOCK_BYTES - 1]
    data = b"\n".join(bytes(rng.choices(b"abc ", k=rng.choice(lengths))) for _ in range(40))
    source = open_source(write(tmp_path, "a.txt.zst", data), cache=tmp_path / "cache")
    expected = read_all(Text(write(tmp_path, "a.txt", data)))
    assert len(expected) > 5
    assert read_all(source, [3, 100, 1000]) == expected


def test_several_members_are_one_file(tmp_path: Path) -> None:
    for suffix in (".gz", ".zst"):
        (tmp_path / f"a.jsonl{suffix}").write_bytes(b"".join(compress(records(i), suffix) for i in "abc"))
        assert read_all(open_source(tmp_path / f"a.jsonl{suffix}", cache=tmp_path / "cache")) == ["a", "b", "c"]


def test_plain_and_compressed_files_mix(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.ndjson.zstd"):
        (tmp_path / "in" / name).write_bytes(
            compress(records(name), Path(name).suffix.replace("zstd", "zst")) if name != "a.jsonl" else records(name)
        )
    source = open_source(tmp_path / "in", cache=tmp_path / "cache")
    assert [read_all(source, file=file) for file in range(4)] == [[name] for name in source.listing.names]


def test_more_documents_than_bytes_are_each_in_one_range(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "a.txt.gz", b"x\n" * 5000), split="line", cache=tmp_path / "cache")
    size = int(source.listing.sizes[0])
    assert size < 200
    whole = documents(source)
    assert [ref for _, ref, _ in whole] == list(range(5000))
    assert documents(source, list(range(size))) == whole
    assert whole[2500][0] == size // 2


def made(cache: Path) -> int:
    return len(list(cache.rglob("index.json")))


def test_opening_decodes_nothing_and_each_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for name in "ab":
        write(tmp_path / "in", f"{name}.jsonl.gz", records(name))
    source = open_source(tmp_path / "in", cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert read_all(source) == ["a"]
    assert made(tmp_path / "cache") == 1
    monkeypatch.setattr("lightning_fms.data.sources.decoded.write_unit", None)
    assert read_all(open_source(tmp_path / "in", cache=tmp_path / "cache")) == ["a"]


def test_a_replaced_file_and_another_key_are_decoded_anew(tmp_path: Path) -> None:
    def texts(**options: str) -> list:
        return read_all(open_source(tmp_path / "a.jsonl.gz", cache=tmp_path / "cache", **options))

    write(tmp_path, "a.jsonl.gz", b'{"text": "one", "other": "two"}\n')
    assert texts() == ["one"]
    assert texts(text_key="other") == ["two"]
    replace(tmp_path / "a.jsonl.gz", b'{"text": "new", "other": "two"}\n')
    assert texts() == ["new"]


def replace(path: Path, data: bytes) -> None:
    """Write a file anew; the clock of a file system is too coarse to tell the two by itself."""
    seconds = path.stat().st_mtime + 5
    path.write_bytes(gzip.compress(data, mtime=0))
    os.utime(path, (seconds, seconds))


def test_a_file_replaced_under_a_run_is_noticed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit=1)
    source = open_source(write(tmp_path, "a.jsonl.gz", records("one")), cache=cache)
    assert read_all(source) == ["one"]
    replace(tmp_path / "a.jsonl.gz", records("eon"))
    assert read_all(source) == ["one"]  # decoded before, and open
    read_all(open_source(write(tmp_path, "b.jsonl.gz", records("b")), cache=cache))  # evicts it
    elsewhere = pickle.loads(pickle.dumps(source))  # has nothing open
    with pytest.raises(DocumentError, match=r"a.jsonl.gz: (was replaced while the run reads it|has \d+ bytes)"):
        read_all(elsewhere)


def test_a_cache_smaller_than_a_file_works(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", limit=1)
    sources = [open_source(write(tmp_path, f"{i}.jsonl.gz", records(*"abc")), cache=cache) for i in range(3)]
    for _ in range(2):
        for source in sources:
            assert read_all(source) == ["a", "b", "c"]
    assert made(tmp_path / "cache") == 1


# -- broken files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_file_is_an_error_and_never_half_a_file(tmp_path: Path, suffix: str) -> None:
    whole = compress(records(*map(str, range(3000))), suffix)
    path = tmp_path / f"a.jsonl{suffix}"
    for length in (5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        source = open_source(path, cache=tmp_path / "cache")
        for _ in range(2):
            with pytest.raises(
                DocumentError, match=f"a.jsonl{suffix}: cannot be decompressed .* beyond byte .*Truncated"
            ):
                source.window(0, 0, length)
    assert made(tmp_path / "cache") == 0
    path.write_bytes(whole)
    assert len(read_all(open_source(path, cache=tmp_path / "cache"))) == 3000


def test_what_is_no_gzip_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(records("plain"))
    with pytest.raises(DocumentError, match=r"a.jsonl.gz: cannot be decompressed as gzip beyond byte 0"):
        read_all(open_source(tmp_path, cache=tmp_path / "cache"))


def one_by_one(source: Source) -> list:
    window = source.window(0, 0, int(source.listing.sizes[0]))
    found: list = []
    for start, ref in zip(window.starts.tolist(), window.refs.tolist(), strict=True):
        try:
            found.append(source.read(0, start, ref))
        except DocumentError as error:
            found.append(str(error).removeprefix(f"{source.listing.path(0)}: "))
    return found


def test_a_broken_record_is_named_and_its_neighbours_are_read(tmp_path: Path) -> None:
    data = records("a") + b'{"text": null}\n{"text"\n\xff\n{"x": 1}\n[]\n' + records("b")
    found = one_by_one(open_source(write(tmp_path, "a.jsonl.gz", data), cache=tmp_path / "cache"))
    assert found == [
        "a",
        "the record at byte 14 has 'text' of type NoneType; it must be a string",
        "the record at byte 29 is not valid JSON (Expecting ':' delimiter at character 7)",
        "byte 37 is not valid UTF-8 (invalid start byte); convert the file to UTF-8",
        "the record at byte 39 has no key 'text'; it has 'x': set text_key to one of them",
        "the record at byte 48 is a list, not an object with a key 'text'",
        "b",
    ]
    (tmp_path / "a.jsonl").write_bytes(data)
    assert one_by_one(JsonLines(tmp_path / "a.jsonl")) == found


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DocumentError, match=r"a.jsonl.gz: more than 10000 documents cannot be read; the last: the record"
    ):
        read_all(open_source(write(tmp_path, "a.jsonl.gz", b"1\n" * 10_001), cache=tmp_path / "cache"))
