"""A run that goes on computes its cuts from the files that it began with, whatever has become of them."""

import json
import shutil
from collections import Counter
from pathlib import Path

import fsspec
import pytest

from lightning_fms.data import StreamLoader
from lightning_fms.data.audit import readings
from lightning_fms.data.report import describe
from lightning_fms.data.sources import JsonLines, list_files
from lightning_fms.data.sources.kept_listing import kept_file, list_or_recall
from tests.data.chains import Phase, run_phase, write_jsonl, write_litdata


@pytest.fixture
def options(tmp_path: Path) -> dict:
    corpus = write_jsonl(tmp_path / "corpus", "p", 60, files=4)
    return {"sources": {"p": corpus}, "seq_len": 24, "num_streams": 4, "listings": str(tmp_path / "run" / "listings")}


def first_half(options: dict) -> dict:
    return run_phase(options, Phase(2, 4, None, 5), None, 0)[1]


def test_the_listing_is_kept_once_and_whole(options: dict, tmp_path: Path) -> None:
    first_half(options)
    files = list((tmp_path / "run" / "listings").iterdir())
    assert [file.name for file in files] == ["p.json"]
    kept = json.loads(files[0].read_text())
    assert kept["names"] == [f"p-{i}.jsonl" for i in range(4)]
    assert sum(kept["sizes"]) == list_files(options["sources"]["p"]).total_bytes


def test_files_that_are_gone_beyond_the_first_five_are_counted(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "corpus", "p", 60, files=9)
    options = {"sources": {"p": corpus}, "seq_len": 24, "global_batch_size": 4, "listings": tmp_path / "listings"}
    StreamLoader(**options)
    for file in range(7):
        (corpus / f"p-{file}.jsonl").unlink()
    lines = describe(StreamLoader(**options))
    assert sum("is gone" in line for line in lines) == 5
    assert "    and 2 more files are gone or have another size" in lines


def test_a_vanished_file_is_a_hole_and_moves_nothing_else(options: dict) -> None:
    state = first_half(options)
    whole, _ = run_phase(options, Phase(1, 4, None, 12), state, 20)
    gone = options["sources"]["p"] / "p-2.jsonl"
    lost = {json.loads(line)["text"] for line in gone.read_text().splitlines()}
    gone.unlink()
    loader = StreamLoader(**options, global_batch_size=4, on_error="skip", state=state)
    assert loader.listings["p"].changes == ("p-2.jsonl is gone",)
    for _ in zip(range(12), loader, strict=False):
        pass
    after = loader.state_dict()
    assert int(after["rows"][:, loader._columns.skipped].sum()) > 0
    assert after["header"]["listings"] == state["header"]["listings"]
    holes, _ = run_phase({**options, "on_error": "skip"}, Phase(1, 4, None, 12), state, 20)
    assert holes != whole
    assert lost
    with pytest.raises(ValueError, match=r"p-2\.jsonl: cannot be read"):
        run_phase(options, Phase(1, 4, None, 12), state, 20)


@pytest.mark.parametrize("gone", range(4))
def test_a_vanished_file_takes_nothing_that_waits_behind_it_along(options: dict, gone: int) -> None:
    options |= {"num_streams": 1, "packing": "best_fit", "seq_len": 256, "global_batch_size": 1}
    write_jsonl(options["sources"]["p"], "p", 400, files=4)  # so that all that wait are of one file
    fresh = StreamLoader(**options)
    state = next(loader.state_dict() for loader, _ in zip([fresh] * 5, fresh, strict=False))
    begin = state["header"]["row"]
    read = list(readings(StreamLoader(**options), 0, begin))
    (options["sources"]["p"] / f"p-{gone}.jsonl").unlink()
    read += readings(StreamLoader(**options, on_error="skip", state=state), begin, begin + 120)
    names = [f"p-{i}.jsonl" for i in range(4) if i != gone]
    begun = Counter((part.file, part.start) for part in read if part.epoch == 0 and part.first_token == 0)
    files = list_files(options["sources"]["p"])
    starts = {
        (name, int(at))
        for i, name in enumerate(files.names)
        for at in JsonLines(files).window(i, 0, int(files.sizes[i])).starts
    }
    assert {document: count for document, count in begun.items() if document[0] in names} == dict.fromkeys(starts, 1)


def test_processes_of_one_id_on_two_nodes_may_keep_a_listing_at_once(
    options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, paths = tmp_path / "shared" / "p.json", options["sources"]["p"]
    first = []

    def other_node(_: int) -> None:  # comes between writing aside and renaming
        if not first:
            first.append(True)
            assert list_or_recall(file, paths).names

    monkeypatch.setattr("os.fsync", other_node)
    assert list_or_recall(file, paths).digest == list_or_recall(file, paths).digest
    assert [found.name for found in file.parent.iterdir()] == ["p.json"]


def test_without_the_listing_a_changed_source_is_refused(options: dict) -> None:
    del options["listings"]
    state = first_half(options)
    (options["sources"]["p"] / "p-2.jsonl").unlink()
    with pytest.raises(ValueError, match=r"is not what the run started with: 4 files .* 3 files"):
        StreamLoader(**options, global_batch_size=4, state=state)


def test_a_file_that_grew_is_read_as_far_as_it_reached(options: dict) -> None:
    state = first_half(options)
    expected, _ = run_phase(options, Phase(1, 4, None, 12), state, 20)
    grown = options["sources"]["p"] / "p-1.jsonl"
    with grown.open("a") as out:
        out.write(json.dumps({"text": "written later"}) + "\n")
    loader = StreamLoader(**options, global_batch_size=4, state=state)
    [change] = loader.listings["p"].changes
    assert change.startswith("p-1.jsonl had ")
    assert run_phase(options, Phase(1, 4, None, 12), state, 20)[0] == expected


def test_new_files_are_refused_with_the_way_out(options: dict) -> None:
    first_half(options)
    shutil.copy(options["sources"]["p"] / "p-1.jsonl", options["sources"]["p"] / "q.jsonl")
    with pytest.raises(
        ValueError, match=r"1 files were added since the run began \(q.jsonl\).*add these as another source"
    ):
        StreamLoader(**options, global_batch_size=4)


def test_files_may_move(options: dict, tmp_path: Path) -> None:
    state = first_half(options)
    expected, _ = run_phase(options, Phase(1, 4, None, 8), state, 20)
    shutil.move(options["sources"]["p"], tmp_path / "elsewhere")
    options["sources"] = {"p": tmp_path / "elsewhere"}
    assert run_phase(options, Phase(1, 4, None, 8), state, 20)[0] == expected


def test_a_vanished_file_may_have_been_the_only_one_outside_a_folder(options: dict) -> None:
    below = options["sources"]["p"] / "below"
    below.mkdir()
    for name in ("p-0.jsonl", "p-1.jsonl", "p-2.jsonl"):
        shutil.move(options["sources"]["p"] / name, below / name)
    state = first_half(options)
    (options["sources"]["p"] / "p-3.jsonl").unlink()
    loader = StreamLoader(**options, global_batch_size=4, state=state)
    assert loader.listings["p"].changes == ("p-3.jsonl is gone",)


def test_a_vanished_litdata_chunk_is_a_hole(tmp_path: Path) -> None:
    chunks = write_litdata(tmp_path / "l", 60)
    options = {"sources": {"l": chunks}, "seq_len": 24, "num_streams": 4, "listings": tmp_path / "listings"}
    first_half(options)
    victim = sorted(chunks.glob("*.bin"))[0]
    victim.unlink()
    loader = StreamLoader(**options, global_batch_size=4, on_error="skip")
    assert any(victim.name in change for change in loader.listings["l"].changes)
    for _ in zip(range(40), loader, strict=False):
        pass
    assert int(loader.state_dict()["rows"][:, loader._columns.skipped].sum()) > 0


def test_a_damaged_listing_is_one_clear_message(options: dict, tmp_path: Path) -> None:
    first_half(options)
    file = kept_file(tmp_path / "run" / "listings", "p")
    file.write_text(file.read_text()[:20])
    with pytest.raises(ValueError, match=r"p\.json: is no listing of a run's files; restore it, or remove it"):
        StreamLoader(**options, global_batch_size=4)


def test_everything_gone_is_an_error_at_once(options: dict) -> None:
    first_half(options)
    shutil.rmtree(options["sources"]["p"])
    with pytest.raises(ValueError, match="no such file or folder"):
        StreamLoader(**options, global_batch_size=4)


def test_remote_listings_are_kept_too(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    for name in ("a", "b"):
        fs.pipe(f"/kept/{name}.jsonl", (json.dumps({"text": f"{name} text"}) + "\n").encode() * 9)
    kept = list_or_recall(tmp_path / "l.json", "memory://kept/*.jsonl")
    fs.rm("/kept/b.jsonl")
    again = list_or_recall(tmp_path / "l.json", "memory://kept/*.jsonl")
    assert (again.digest, again.names, str(again.root)) == (kept.digest, kept.names, str(kept.root))
    assert again.changes == ("b.jsonl is gone",)
    fs.rm("/kept", recursive=True)
