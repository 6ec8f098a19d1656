"""`records=True`: a document is a whole record, a whole file, or text."""

import gzip
import json
from pathlib import Path

import pytest

from lightning_fms.data.sources import WholeFiles, open_source
from tests.data.cuts import documents, read_all


def test_a_file_is_one_document_of_bytes(tmp_path: Path) -> None:
    for name, data in (("a.png", b"\x89PNG\0"), ("b/c.jpg", b"\xff\xd8"), ("d.jpg", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    source = open_source(tmp_path, records=True)
    assert isinstance(source, WholeFiles)
    assert source.listing.fragments[0].tolist() == [0, 1]  # an empty file is no fragment
    assert documents(source, [1, 2, 3]) == [(0, 0, b"\x89PNG\0")]
    (image,) = read_all(source, file=1)
    assert image == b"\xff\xd8"
    assert image.path == tmp_path / "b" / "c.jpg"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_json_record_keeps_all_its_fields(tmp_path: Path, suffix: str) -> None:
    records = [{"text": "a", "n": 1}, {"other": [None, {"x": 2.5}]}]
    data = "\n".join(map(json.dumps, records)).encode()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    assert read_all(open_source(tmp_path / f"a.jsonl{suffix}", records=True, cache=tmp_path / "cache")) == records


def test_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert read_all(open_source(tmp_path, records=True)) == ["one\ntwo\n"]
    assert read_all(open_source(tmp_path, records=True, split="line")) == ["one", "two"]


def test_tokens_stay_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x01\0\x02\0")
    assert [document.tolist() for document in read_all(open_source(tmp_path, records=True))] == [[1, 2]]


def test_what_does_not_go_with_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.png").write_bytes(b"x")
    for path, options, words in (
        ("a.jsonl", {"text_key": "a"}, "text_key='a' does not apply to whole records"),
        ("a.png", {"text_key": "a"}, "text_key='a' does not apply to whole files"),
        ("", {}, "mixes formats"),
    ):
        with pytest.raises(ValueError, match=words):
            open_source(tmp_path / path, records=True, **options)
    with pytest.raises(ValueError, match=r"unknown format \['.png'\]"):
        open_source(tmp_path / "a.png")


def test_a_file_address_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    source = open_source(f"file://{tmp_path}/a.txt")
    assert source.listing.remote is None
    assert read_all(source) == ["one"]
