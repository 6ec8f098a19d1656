"""`fms-data prepare`: what it writes is read by litdata and by a run, and no kill can spoil it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from litdata import StreamingDataset, TokensLoader

from lightning_fms.data import StreamLoader
from tests.commands.calls import WRITERS, call, documents_of, refused, text, write_jsonl

COUNT = 120


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FMS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", list(WRITERS))
def test_text_is_what_the_source_holds_in_its_order(form: str, tmp_path: Path) -> None:
    data, out = WRITERS[form](tmp_path / "in", COUNT), tmp_path / "out"
    assert call("prepare", data, "--out", out, "--workers", 1, "--chunk-bytes", 4000) == 0
    assert not (tmp_path / "cache").exists()
    expected = [text(n) for n in range(COUNT)]
    assert len(list(out.glob("*.bin"))) > 3
    assert documents_of(out) == documents_of(data) == expected
    stock = StreamingDataset(str(out))
    assert [stock[i] for i in range(len(stock))] == expected


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # litdata copies it at once
@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_those_that_a_run_makes_and_litdata_reads(workers: int, tmp_path: Path) -> None:
    data, out, block = write_jsonl(tmp_path / "in", COUNT), tmp_path / "out", 32
    options = ("--tokenizer", "bytes", "--chunk-bytes", 3000, "--workers", workers)
    assert call("prepare", data, "--out", out, *options) == 0
    expected = [[*text(n).encode(), 256] for n in range(COUNT)]
    assert documents_of(out) == expected
    stock = StreamingDataset(str(out), item_loader=TokensLoader(block_size=block))
    blocks = [stock[i].tolist() for i in range(len(stock))]
    index = json.loads((out / "index.json").read_text())
    lines, at = [], 0
    for chunk in index["chunks"]:  # litdata leaves out what is behind the last whole block of a chunk
        line = [token for tokens in expected[at : at + chunk["chunk_size"]] for token in tokens]
        assert chunk["dim"] == len(line)
        lines += [line[i : i + block] for i in range(0, len(line) - block + 1, block)]
        at += chunk["chunk_size"]
    assert blocks == lines
    assert at == COUNT


def test_a_run_reads_the_same_documents_from_either(tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "in", COUNT, files=1), tmp_path / "out"
    assert call("prepare", data, "--out", out, "--tokenizer", "bytes", "--workers", 1) == 0
    assert _one_pass(out) == _one_pass(data) == sorted(text(n).encode() for n in range(COUNT))


def _one_pass(path: Path) -> list[bytes]:
    """The documents of a whole epoch, as a run has them in its rows."""
    loader = StreamLoader({"a": path}, seq_len=64, global_batch_size=1, one_pass=True)
    line: list[int] = []
    for batch in loader:
        if not batch["row_valid"].any():
            break
        known = min(64, int((batch["labels"] != -100).sum()) + 1)
        line += batch["input_ids"][0, :known].tolist()
    ends = [i for i, token in enumerate(line) if token == 256]
    return sorted(bytes(line[start:end]) for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False))


def test_tokens_stay_tokens(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    assert call("prepare", tmp_path / "a.bin", "--out", tmp_path / "out", "--workers", 1) == 0
    assert documents_of(tmp_path / "out") == [ids.tolist()]


def test_tokens_are_not_tokenized_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    said = refused(capsys, 2, "prepare", tmp_path / "a.bin", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert "holds tokens already; leave out --tokenizer" in said
    assert not (tmp_path / "out").exists()


# -- killed, and started again --------------------------------------------------------------------------------------------


def test_a_killed_command_goes_on_and_does_nothing_twice(tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "in", 4000, files=2), tmp_path / "out"
    options = [str(data), "--out", str(out), "--tokenizer", "bytes", "--chunk-bytes", "5000"]
    command = [sys.executable, "-m", "lightning_fms.commands.data", "prepare", *options, "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    log = out / ".prepare" / "units.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 5):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "index.json").exists()
    before = {file.name: file.stat().st_ino for file in out.glob("chunk-*.bin")}
    kept = {chunk["filename"] for line in log.read_bytes().splitlines() for chunk in json.loads(line)["chunks"]}
    with log.open("ab") as file:
        file.write(b'{"unit": 9999, "chu')  # a torn line
    (out / ".chunk-7-0.bin.1").write_bytes(b"half")
    assert call("prepare", *options, "--workers", 1) == 0
    assert documents_of(out) == [[*text(n).encode(), 256] for n in range(4000)]
    assert kept
    assert {name: (out / name).stat().st_ino for name in kept} == {name: before[name] for name in kept}
    assert not list(out.glob(".chunk*"))


def test_a_second_time_there_is_nothing_to_do_and_a_lost_chunk_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_jsonl(tmp_path / "in", COUNT), tmp_path / "out"
    command = ("prepare", data, "--out", out, "--workers", 1, "--chunk-bytes", 4000)
    assert call(*command) == 0
    written = capsys.readouterr().out
    assert call(*command) == 0
    assert f"complete already: {written.partition(': ')[2]}" in capsys.readouterr().out
    chunk = sorted(out.glob("chunk-*.bin"))[1]
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    assert call(*command) == 0
    assert chunk.read_bytes() == whole


def test_other_arguments_and_other_inputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_jsonl(tmp_path / "in", COUNT), tmp_path / "out"
    command = ("prepare", data, "--out", out, "--workers", 1)
    assert call(*command) == 0
    assert "was begun with text_key=None, and now it is 'id'" in refused(capsys, 2, *command, "--text-key", "id")
    assert "was begun with tokenizer=None, and now it is 'bytes'" in refused(
        capsys, 2, *command, "--tokenizer", "bytes"
    )
    part = data / "part-1.jsonl"
    content = part.read_bytes()
    part.write_bytes(content + b"\n")
    said = refused(capsys, 2, *command)
    assert (
        f"part-1.jsonl had {len(content):,} bytes and has {len(content) + 1:,}; restore them, or give another folder"
        in said
    )
    part.write_bytes(content)
    os.utime(part, ns=(1, 1))
    assert "part-1.jsonl was written again" in refused(capsys, 2, *command)
    (data / "part-9.jsonl").write_bytes(content)
    said = refused(capsys, 2, *command)
    assert "other inputs (3 files, now 4): part-1.jsonl was written again, part-9.jsonl is new" in said


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_jsonl(tmp_path / "in", COUNT), tmp_path / "out"
    out.mkdir()
    (out / "chunk-0-0.bin").write_bytes(b"precious")
    assert "is nothing that this command began" in refused(capsys, 2, "prepare", data, "--out", out)
    assert (out / "chunk-0-0.bin").read_bytes() == b"precious"
    assert "lies inside" in refused(capsys, 2, "prepare", data, "--out", data / "chunks")


# -- documents that cannot be read ----------------------------------------------------------------------------------------


def test_a_broken_document_ends_the_command_or_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "a.jsonl", tmp_path / "out"
    data.write_text('{"text": "one"}\n{"text": 3}\n{"text": ""}\n{"text": "\\ud800"}\n{"text": "two"}\n')
    command = ("prepare", data, "--out", out, "--workers", 2)
    said = refused(capsys, 1, *command)
    assert f"{data}: the record at byte 16 has 'text' of type int; it must be a string" in said
    assert said.endswith("--on-error skip leaves such documents out")
    assert not (out / "index.json").exists()
    assert call(*command, "--on-error", "skip") == 0
    said = capsys.readouterr()
    assert (
        "2 documents, 1 chunks, 0.0 MB, 1 empty documents left out, 2 documents that cannot be read left out"
        in said.out
    )
    assert "left out: " in said.err
    assert documents_of(out) == ["one", "two"]


def test_a_compressed_file_that_breaks_off_gives_what_stands_before(tmp_path: Path) -> None:
    data = WRITERS["gz"](tmp_path / "in", 20_000)
    part = data / "part-1.jsonl.gz"
    part.write_bytes(part.read_bytes()[:-1000])
    assert call("prepare", data, "--out", tmp_path / "out", "--on-error", "skip", "--workers", 1) == 0
    found = documents_of(tmp_path / "out")
    assert found == [text(n) for n in range(len(found))]
    assert 10_000 < len(found) < 20_000


def test_nothing_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    said = refused(capsys, 1, "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", 1)
    assert "no document has anything in it" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "0"), "--workers 0: must be at least 1"),
        (("--chunk-bytes", "5"), "'5' is no size from 1KB to 2GB"),
        (("--tokenizer", "nowhere.json"), "tokenizer='nowhere.json': cannot be read"),
        (("--text-key", "body"), "has no key 'body'; it has 'id', 'text': give --text-key one of them"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "in", 6)
    code = 1 if "body" in words else 2
    assert said in refused(capsys, code, "prepare", data, "--out", tmp_path / "out", *words)
