"""`fms-data inspect`: estimates are near the truth, what is counted is exact, and odd data is found."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands.calls import WRITERS, call, refused, text, write_jsonl


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert call("inspect", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)[0]


@pytest.mark.parametrize("form", list(WRITERS))
def test_a_small_source_is_counted(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(capsys, WRITERS[form](tmp_path / "in", 120), "--sample", 1000)
    lengths = sorted(len(text(n).encode()) for n in range(120))
    assert (found["documents"], found["tokens"]) == (120, sum(lengths))
    assert found["documents_exact"]
    assert found["tokens_exact"]
    assert found["tokens_of_a_document"]["p50"] == lengths[59]
    assert found["tokens_of_a_document"]["longest"] == lengths[-1]
    assert found["odd"] == {}


@pytest.mark.parametrize("form", list(WRITERS))
def test_a_large_one_is_estimated(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = 12_000
    found = inspect(capsys, WRITERS[form](tmp_path / "in", count), "--sample", 1500)
    tokens = sum(len(text(n).encode()) for n in range(count))
    assert found["documents"] == pytest.approx(count, rel=0.1)
    assert found["tokens"] == pytest.approx(tokens, rel=0.15)
    assert not found["tokens_exact"]
    assert found["documents_exact"] == (form == "parquet")


def test_prepared_chunks_say_what_they_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_jsonl(tmp_path / "in", 3000), tmp_path / "out"
    assert call("prepare", data, "--out", out, "--tokenizer", "bytes", "--workers", 1, "--chunk-bytes", 100_000) == 0
    found = inspect(capsys, out, "--sample", 20)
    assert (found["documents"], found["tokens"]) == (3000, sum(len(text(n).encode()) + 1 for n in range(3000)))
    assert (found["format"], found["documents_exact"], found["tokens_exact"]) == ("litdata chunks", True, True)


def test_blocks_of_bare_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.zeros(40 << 16, np.uint16).tofile(tmp_path / "a.bin")
    found = inspect(capsys, tmp_path / "a.bin")
    assert (found["format"], found["documents"], found["tokens"]) == ("tokens", 40, 40 << 16)


def test_odd_data_is_counted_and_the_first_of_it_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(b'{"text": ""}\n{"text": null}\n{"text": "\xff"}\n{"text": "x"}\nnonsense\n{"text": null}\n')
    assert call("inspect", data) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(data)
    assert f"  empty      1 in the sample; first: {data}: byte 0" in lines
    assert (
        f"  null       2 in the sample; first: {data}: the record at byte 13 has 'text' of type NoneType; it must be a string"
        in lines
    )
    assert any(
        line.startswith(f"  bad UTF-8  1 in the sample; first: {data}: byte 38 is not valid UTF-8") for line in lines
    )
    assert any(line.startswith(f"  broken     1 in the sample; first: {data}: the record at byte") for line in lines)
    assert "  documents  6" in lines
    assert "  tokens     1 (tokenizer bytes; counted)" in lines


def test_files_of_no_bytes_are_counted_and_the_first_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "\n')
    (tmp_path / "b.jsonl").touch()
    assert call("inspect", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == f"             1 of them of 0 bytes; first: {tmp_path / 'b.jsonl'}"
    assert "  documents  2" in lines
    assert any("not valid JSON (Unterminated string starting at character 9)" in line for line in lines)


def test_odd_rows_of_tables_and_files_that_break_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"text": ["a", None, ""]}), tmp_path / "a.parquet")
    found = inspect(capsys, tmp_path / "a.parquet")
    assert {kind: odd["count"] for kind, odd in found["odd"].items()} == {"null": 1, "empty": 1}
    assert "row 1 has null in 'text'" in found["odd"]["null"]["first"]
    assert found["odd"]["empty"]["first"].endswith("a.parquet: row 2")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 10)[:-5])
    found = inspect(capsys, tmp_path / "a.jsonl.gz")
    assert "cannot be decompressed as gzip" in found["odd"]["broken"]["first"]


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "inspect takes paths, or --run RUN_FOLDER; give one of them" in refused(capsys, 2, "inspect")
    assert "nowhere: no such file or folder" in refused(capsys, 2, "inspect", tmp_path / "nowhere")
    said = refused(capsys, 2, "inspect", "--run", tmp_path, "--tokenizer", "bytes")
    assert "--run takes tokenizer and text_key from the run's config" in said
    assert "argument COMMAND: invalid choice: 'look'" in refused(capsys, 2, "look")
    assert "'none' is no count of at least 1" in refused(capsys, 2, "inspect", tmp_path, "--sample", "none")
