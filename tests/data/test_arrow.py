"""Each row of an Arrow file or stream is a document, once for any cut."""

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.sources import DocumentError, decoded, open_source
from tests.data.cuts import documents, read_all


def write(
    path: Path, texts: list, rows: int = 1000, stream: bool = False, kind: pa.DataType | None = None, **options: object
) -> Path:
    table = pa.table(
        {"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string()).cast(kind or pa.string())}
    )
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@settings(deadline=None, derandomize=True, max_examples=20)
@given(
    st.lists(st.text(max_size=20), max_size=40),
    st.integers(3, 40),
    st.sampled_from([1, 1000, 4 << 20]),
    st.booleans(),
    st.sampled_from([None, "lz4", "zstd"]),
    st.lists(st.floats(0, 1), max_size=6),
)
def test_every_row_once_for_any_cut(
    texts: list[str], rows: int, unit: int, stream: bool, compression: str | None, cuts: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded, "UNIT_BYTES", unit)
        path = write(Path(folder, "a.arrow"), texts, rows, stream, compression=compression)
        source = open_source(path, cache=Path(folder, "cache"))
        whole = documents(source)
        assert [(row, text) for _, row, text in whole] == list(enumerate(texts))
        assert documents(source, [int(cut * path.stat().st_size) for cut in cuts]) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_dictionaries_that_grow(tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "UNIT_BYTES", 1)
    batches = [
        pa.record_batch({"text": pa.array(words).dictionary_encode()}) for words in (["a", "b"], ["a", "b", "c"])
    ]
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(
        str(tmp_path / "a.arrow"), batches[0].schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    assert read_all(open_source(tmp_path / "a.arrow", cache=tmp_path / "cache")) == ["a", "b", "a", "b", "c"]


def test_feather_and_wide_schemas(tmp_path: Path) -> None:
    table = pa.table(
        {"text": ["a", "b"], **{f"column_{i}": [i, i] for i in range(200)}}
    )  # a header beyond the first read
    pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"))
    assert read_all(open_source(tmp_path / "a.feather", cache=tmp_path / "cache")) == ["a", "b"]


def test_whole_rows_with_binary_columns(tmp_path: Path) -> None:
    rows = [{"image": {"bytes": b"\0\xff", "path": None}, "label": 3}, {"image": None, "label": None}]
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert read_all(open_source(tmp_path / "a.arrow", records=True, cache=tmp_path / "cache")) == rows


def save_to_disk(folder: Path, texts: list[str]) -> None:
    """What `datasets` writes, as of its version 4."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(texts):05}.arrow" for i in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        write(folder / name, [text, text], rows=1, stream=True)
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string", "_type": "Value"}}}')
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def test_a_saved_dataset(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", ["a", "b"])
    source = open_source(tmp_path / "set", cache=tmp_path / "cache")
    assert [read_all(source, file=file) for file in (0, 1)] == [["a", "a"], ["b", "b"]]


def test_saved_splits_are_named(tmp_path: Path) -> None:
    for split in ("test", "train"):
        save_to_disk(tmp_path / split, [split])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ValueError, match=r"holds the splits \['train', 'test'\]; name the folder of one, such as .*/train"
    ):
        open_source(tmp_path, cache=tmp_path / "cache")


def test_saved_indices_are_refused(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "set", ["a"])
    (tmp_path / "set" / "state.json").write_text(
        '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}'
    )
    with pytest.raises(ValueError, match=r"its rows are chosen by an index; save dataset.flatten_indices\(\)"):
        open_source(tmp_path / "set", cache=tmp_path / "cache")


# -- what can be wrong ----------------------------------------------------------------------------------------------------


def test_a_null_is_an_error_of_its_row(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.arrow", ["a", None, "c"], rows=2), cache=tmp_path / "cache")
    assert [source.read(0, 0, row) for row in (0, 2)] == ["a", "c"]
    with pytest.raises(DocumentError, match=r"a.arrow: row 1 has null in 'text'"):
        source.read(0, 0, 1)


def test_a_wrong_column_lists_those_there_are(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.arrow", ["a"]), text_key="words", cache=tmp_path / "cache")
    with pytest.raises(DocumentError, match=r"a.arrow: has no column 'words' .*'id' \(int64\), 'text' \(string\)"):
        source.window(0, 0, 10)


def test_a_broken_batch_is_an_error_and_the_rows_before_it_are_read(tmp_path: Path) -> None:
    texts = [f"{i} " * 50 for i in range(300)]
    path = write(tmp_path / "a.arrow", texts, rows=100, compression="zstd")
    data = bytearray(path.read_bytes())
    magic = data.rfind(b"\x28\xb5\x2f\xfd")  # of the last Zstandard frame: the texts of the last batch
    data[magic : magic + 4] = bytes(4)
    path.write_bytes(data)
    source = open_source(path, cache=tmp_path / "cache")
    assert [source.read(0, 0, row) for row in (0, 199)] == [texts[0], texts[199]]
    for row in (200, 299):
        with pytest.raises(DocumentError, match=r"a.arrow: rows 200 to 299 cannot be decoded .*; restore the file"):
            source.read(0, 0, row)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_file_is_an_error_wherever_it_was_cut(tmp_path: Path, stream: bool) -> None:
    path = write(tmp_path / "a.arrow", [str(i) for i in range(100)], rows=10, stream=stream)
    data = path.read_bytes()
    whole = [str(i) for i in range(100)]
    for size in range(1, len(data), 61):
        path.write_bytes(data[:size])
        source = open_source(path, cache=tmp_path / "cache")
        try:
            texts = read_all(source)
        except DocumentError:
            continue
        assert stream  # which has no end mark that must be there
        assert texts == whole[: len(texts)]
        assert len(texts) % 10 == 0


@pytest.mark.parametrize(
    "data", [b"words and more words", b"\xff\xff\xff\xff\x08\0\0\0" + b"\xff" * 8, b"FEA1" + bytes(20), bytes(8)]
)
def test_what_is_no_arrow_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(data)
    with pytest.raises(DocumentError, match=r"a.arrow: (has no Arrow|is a Feather file of version 1)"):
        open_source(tmp_path / "a.arrow", cache=tmp_path / "cache").window(0, 0, len(data))
