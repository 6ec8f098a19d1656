"""What cannot be read is left out, told of once, and written down once, whoever comes to it and however often."""

import gzip
import json
import logging
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from lightning_fms.data import StreamLoader
from lightning_fms.data.audit import loader_at
from lightning_fms.data.quarantine import Quarantine, Where
from tests.data.chains import Phase, document, run_phase, through_disk

FILES, DOCUMENTS = 6, 40


def line(number: int) -> str:
    """A JSON line; every seventh cannot be read."""
    return json.dumps({"text": document("q", number)}) if number % 7 else '{"text": ' + str(number)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(FILES):
        lines = [line(file * DOCUMENTS + n) for n in range(DOCUMENTS)]
        (folder / f"{file}.jsonl").write_text("".join(text + "\n" for text in lines))
    (folder / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 500)[:-20])
    return folder


@pytest.fixture
def options(corpus: Path, tmp_path: Path) -> dict:
    return {
        "sources": {"q": {"path": corpus, "cache": tmp_path / "cache"}}, "seq_len": 24, "num_streams": 6,
        "on_error": "quarantine", "quarantine": tmp_path / "run" / "quarantine", "shuffle_window": 16,
    }  # fmt: skip


def bad(corpus: Path) -> set[tuple[str, int | None]]:
    """File and first byte of every line that cannot be read, and the file that cannot be decoded."""
    found: set[tuple[str, int | None]] = {(str(corpus / "broken.jsonl.gz"), None)}
    for file in range(FILES):
        at, path = 0, corpus / f"{file}.jsonl"
        for text in path.read_bytes().splitlines(keepends=True):
            found |= set() if text.startswith(b'{"text": "') else {(str(path), at)}
            at += len(text)
    return found


def records(options: dict) -> list[dict]:
    files = sorted(options["quarantine"].glob("*.jsonl"))
    return [json.loads(text) for file in files for text in file.read_text().splitlines()]


def places(options: dict) -> Counter:
    return Counter((entry["file"], entry["start"] if entry["stop"] is None else None) for entry in records(options))


def epochs(loader: StreamLoader) -> int:
    return int(loader.mix_report()["q"]["epoch_min"])


@pytest.mark.parametrize("workers", [0, 2])
def test_every_document_and_file_is_written_once(options: dict, corpus: Path, workers: int) -> None:
    rows, state = run_phase(options, Phase(2, 6, None, 90, workers), None, 0)
    assert epochs(StreamLoader(**options, global_batch_size=6, state=state)) == 1
    found = places(options)
    assert set(found) == bad(corpus)
    assert workers or max(found.values()) == 1  # a worker may be an epoch ahead of another
    skipping = {**options, "on_error": "skip"}
    assert (rows, str(state)) == (run_phase(skipping, Phase(2, 6, None, 90), None, 0)[0], str(state))


def test_other_epochs_and_runs_that_go_on_write_nothing_again(options: dict, corpus: Path) -> None:
    state, first = None, 0
    for world in (2, 3, 1):
        _, state = run_phase(options, Phase(world, 6, None, 60), state and through_disk(state), first)
        first += 360
    loader = StreamLoader(**options, global_batch_size=6, state=state)
    assert epochs(loader) >= 2
    found = places(options)
    assert set(found) == bad(corpus)
    assert max(found.values()) == 1
    assert loader.counters()["skipped"] > len(found)  # every time it is left out


def test_a_record_says_who_found_what_where_and_why(options: dict, corpus: Path) -> None:
    run_phase(options, Phase(2, 6, None, 60, workers=1), None, 0)
    assert {path.name for path in options["quarantine"].iterdir()} <= {f"rank-{r}.worker-0.jsonl" for r in (0, 1)}
    for entry in records(options):
        assert entry["source"] == "q"
        assert entry["worker"] == 0
        assert entry["stream"] % 2 == entry["rank"]
        assert 0 <= entry["epoch"] < 50  # so far is a worker ahead in sources as small as these
        path = Path(entry["file"])
        if entry["stop"] is None:
            data = path.read_bytes()[entry["start"] : entry["start"] + entry["ref"]]
            assert data.startswith(b'{"text": ')
            assert b"\n" not in data
            assert entry["reason"].startswith(f"{path}: the record at byte {entry['start']} is not valid JSON")
        else:
            assert path.name == "broken.jsonl.gz"
            assert "cannot be decompressed as gzip" in entry["reason"]


def write_all(folder: Path, rank: int, go: str) -> None:
    quarantine = Quarantine(folder, rank)
    while not os.path.exists(go):
        pass
    for n in range(200):
        quarantine.write(Where("a", "file", n, None, n, 0, 0), "why")


def test_processes_that_share_a_rank_write_whole_lines_and_none_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    go = str(tmp_path / "go")
    processes = [context.Process(target=write_all, args=(tmp_path / "q", 3, go)) for _ in range(3)]
    for process in processes:
        process.start()
    Path(go).touch()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["rank-3.worker-main.jsonl"]
    entries = [json.loads(text) for text in (tmp_path / "q" / "rank-3.worker-main.jsonl").read_text().splitlines()]
    assert sorted(entry["start"] for entry in entries) == list(range(200))


def test_a_line_that_a_kill_has_cut_spoils_no_other(tmp_path: Path) -> None:
    Quarantine(tmp_path, 0).write(Where("a", "file", 1, None, 1, 0, 0), "why")
    path = tmp_path / "rank-0.worker-main.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    again = Quarantine(tmp_path, 0)
    for start in (1, 2):
        again.write(Where("a", "file", start, None, 1, 0, 0), "why")
    lines = path.read_text().splitlines()
    assert lines[:2] == [whole.strip(), whole[:20]]
    assert [json.loads(text)["start"] for text in lines[2:]] == [2]


def test_an_audit_writes_nothing(options: dict) -> None:
    _, state = run_phase(options, Phase(1, 6, None, 5), None, 0)
    before = sorted(records(options), key=str)
    for _ in zip(range(60), loader_at({**options, "global_batch_size": 6}, state), strict=False):
        pass
    assert sorted(records(options), key=str) == before


def test_impossible_arguments(options: dict, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"on_error='ignore' must be one of 'raise', 'skip', 'quarantine'"):
        StreamLoader(**{**options, "on_error": "ignore"}, global_batch_size=6)
    with pytest.raises(ValueError, match=r"on_error='quarantine' with quarantine=None: give the folder to write to"):
        StreamLoader(**{**options, "quarantine": None}, global_batch_size=6)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"quarantine='.*/file/q': the folder cannot be made \(Not a directory\)"):
        StreamLoader(**{**options, "quarantine": str(tmp_path / "file" / "q")}, global_batch_size=6)
    loader = StreamLoader(**options, global_batch_size=6)
    (options["quarantine"] / "rank-0.worker-main.jsonl").mkdir()
    with pytest.raises(
        ValueError, match=r"rank-0.worker-main.jsonl cannot be written \(Is a directory\).*on_error='skip'"
    ):
        for _ in zip(range(60), loader, strict=False):
            pass


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_file_is_told_of_once_and_the_rest_is_counted(
    options: dict, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for on_error, end in (
        ("quarantine", f"all are written to {options['quarantine']}"),
        ("skip", "what follows is only counted"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            run_phase({**options, "on_error": on_error}, Phase(1, 6, None, 200), None, 0)
        lines = told(caplog)
        assert len(lines) == 5
        assert len({text.split(".jsonl")[0] for text in lines}) == 5
        assert lines[-1].endswith(end)


def test_a_gone_file_is_told_of_once(options: dict, corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = StreamLoader(**{**options, "on_error": "skip", "num_streams": 12}, global_batch_size=12)
    for path in corpus.iterdir():
        if path.name != "0.jsonl":
            path.unlink()
    with caplog.at_level(logging.WARNING):
        for _ in zip(range(60), loader, strict=False):
            pass
    gone = [text for text in told(caplog) if "No such file" in text]
    assert 3 <= len(gone) == len({text.split(": ")[2] for text in gone})


def test_a_source_without_anything_to_read_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.jsonl").write_text('{"body": "a"}\n' * 20)
    loader = StreamLoader({"web": tmp_path / "bad.jsonl"}, 8, 2, on_error="skip")
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="no document with a token") as error:
        next(iter(loader))
    reason = r"the record at byte \d+ has no key 'text'; it has 'body': set text_key to one of them"
    error.match(
        rf"^source 'web': .* epochs: \d+ documents or files could not be read, the last: .*bad.jsonl: {reason}$"
    )
    assert sum("no document with a token in a whole epoch" in text for text in told(caplog)) == 1
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 20)
    with pytest.raises(ValueError, match=r"no document with a token in \d+ epochs: its documents are empty$"):
        next(iter(StreamLoader({"web": tmp_path / "empty.jsonl"}, 8, 2)))


@pytest.mark.parametrize("path", [3, None, [3], {"a.jsonl"}])
def test_a_path_that_is_none_is_named(path: object) -> None:
    with pytest.raises(ValueError, match=r"^source 'a': path=.* is no path; give a file, folder, glob or address"):
        StreamLoader({"a": path}, 8, 2)
