"""Each row of a parquet file is a document, once for any cut, whatever its row groups."""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data.sources import DocumentError, decoded, open_source
from tests.data.cuts import documents, read_all


def write(path: Path, texts: list[str | None], rows: int = 1 << 20, **columns: list) -> Path:
    table = pa.table({"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string()), **columns})
    pq.write_table(table, path, row_group_size=rows)
    return path


@settings(deadline=None, derandomize=True, max_examples=20)
@given(
    st.lists(st.text(max_size=20), max_size=40),
    st.integers(3, 40),
    st.sampled_from([1, 100, 4 << 20]),
    st.lists(st.floats(0, 1), max_size=6),
)
def test_every_row_once_for_any_cut(texts: list[str], rows: int, unit: int, cuts: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded, "UNIT_BYTES", unit)
        path = write(Path(folder, "a.parquet"), texts, rows)
        source = open_source(path, cache=Path(folder, "cache"))
        whole = documents(source)
        assert [text for _, _, text in whole] == texts
        assert [row for _, row, _ in whole] == list(range(len(texts)))
        assert documents(source, [int(cut * path.stat().st_size) for cut in cuts]) == whole


def test_more_rows_than_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["same"] * 20_000}), path)
    source = open_source(path, cache=tmp_path / "cache")
    size = path.stat().st_size
    assert size < 2000
    found = [row for at in range(size) for row in source.window(0, at, at + 1).refs.tolist()]
    assert found == list(range(20_000))


def test_a_row_lies_at_its_fraction_of_its_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "UNIT_BYTES", 1)
    path = write(tmp_path / "a.parquet", [f"{i:04}" * 50 for i in range(400)], rows=100)
    size = path.stat().st_size
    addresses = [at for at, _, _ in documents(open_source(path, cache=tmp_path / "cache"))]
    assert all(abs(at - row * size / 400) < size / 50 for row, at in enumerate(addresses))


def test_units_are_decoded_when_they_are_read_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "UNIT_BYTES", 1)
    (tmp_path / "in").mkdir()
    for name in "ab":
        write(tmp_path / "in" / f"{name}.parquet", [f"{name}{i}" for i in range(40)], rows=10)
    (tmp_path / "in" / "b.parquet").chmod(0o400)
    source = open_source(tmp_path / "in", cache=tmp_path / "cache")
    window = source.window(0, 0, int(source.listing.sizes[0]))
    assert len(window.refs) == 40
    assert not (tmp_path / "cache").exists()
    assert [source.read(0, 0, row) for row in (25, 29)] == ["a25", "a29"]
    assert len(list((tmp_path / "cache").rglob("index.json"))) == 1


def test_small_row_groups_share_a_unit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [str(i) for i in range(300)], rows=3)
    assert read_all(open_source(path, cache=tmp_path / "cache"), [100, 2000]) == [str(i) for i in range(300)]
    assert len(list((tmp_path / "cache").rglob("index.json"))) == 1


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_types_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", "b\u2028", "a"]).cast(kind)}), tmp_path / "a.parquet")
    assert read_all(open_source(tmp_path / "a.parquet", cache=tmp_path / "cache")) == ["a", "b\u2028", "a"]


def test_another_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["a"], body=["b"])
    assert read_all(open_source(path, text_key="body", cache=tmp_path / "cache")) == ["b"]


def test_whole_rows_with_binary_columns(tmp_path: Path) -> None:
    rows = [
        {"image": b"\0\xff", "labels": [1, 2], "meta": {"k": None}},
        {"image": None, "labels": None, "meta": {"k": "v"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_all(open_source(tmp_path / "a.parquet", records=True, cache=tmp_path / "cache")) == rows


# -- what can be wrong ----------------------------------------------------------------------------------------------------


def test_a_null_is_an_error_of_its_row(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a.parquet", ["a", None, "c"], rows=2), cache=tmp_path / "cache")
    assert [source.read(0, 0, row) for row in (0, 2)] == ["a", "c"]
    with pytest.raises(DocumentError, match=r"a.parquet: row 1 has null in 'text'; it must be text"):
        source.read(0, 0, 1)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("words", r"has no column 'words' .*; it has 'id' \(int64\), 'text' \(string\): set text_key"),
        ("id", "has a column 'id' of type int64, not text; it has 'id'"),
    ],
)
def test_a_wrong_column_lists_those_there_are(tmp_path: Path, column: str, words: str) -> None:
    source = open_source(write(tmp_path / "a.parquet", ["a"]), text_key=column, cache=tmp_path / "cache")
    with pytest.raises(DocumentError, match=f"a.parquet: {words}"):
        source.window(0, 0, 10)


def test_what_is_no_parquet(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["a"] * 100)
    whole = path.read_bytes()
    for data in (b"words", whole[:-20], whole[:-8] + b"\xff\xff\xff\x7fPAR1"):
        path.write_bytes(data)
        with pytest.raises(DocumentError, match=r"a.parquet: is not a readable parquet file"):
            open_source(path, cache=tmp_path / "cache").window(0, 0, len(data))


def test_rows_behind_a_broken_page_are_errors_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{i:04} " * 200 for i in range(40_000)]  # 40 MB: more than is decoded at a time
    table = pa.table({"text": texts})
    options = {"compression": "zstd", "use_dictionary": False, "data_page_size": 1 << 12, "row_group_size": 20_000}
    pq.write_table(table, path, **options)
    data = bytearray(path.read_bytes())
    middle = len(data) * 2 // 5
    data[middle : middle + 2000] = bytes(2000)
    path.write_bytes(data)
    source = open_source(path, cache=tmp_path / "cache")
    window = source.window(0, 0, len(data))
    assert len(window.refs) == 40_000
    broken = []
    for row in range(0, 40_000, 500):
        try:
            assert source.read(0, 0, row) == texts[row]
        except DocumentError:
            broken.append(row)
    with pytest.raises(DocumentError, match=r"a.parquet: rows \d+ to 19999 cannot be decoded .*; restore the file"):
        source.read(0, 0, broken[0])
    assert broken == list(range(broken[0], 20_000, 500))
    assert 5_000 < broken[0] < 19_000


def test_a_file_cut_after_the_listing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", ["a"] * 100)
    source = open_source(path, cache=tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DocumentError, match=r"a.parquet: has \d+ bytes, \d+ when the run listed it"):
        source.window(0, 0, 10)


def test_bad_utf8_is_an_error_of_its_row(tmp_path: Path) -> None:
    column = pa.StringArray.from_buffers(3, *pa.array([b"good", b"\xff\xfe", b"fine"]).buffers()[1:])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", cache=tmp_path / "cache")
    assert [source.read(0, 0, row) for row in (0, 2)] == ["good", "fine"]
    with pytest.raises(DocumentError, match=r"row 1 cannot be read .*Invalid UTF8 sequence"):
        source.read(0, 0, 1)


PEAK = """
import re, sys
from lightning_fms.data.sources import open_source
source = open_source(sys.argv[1], cache=sys.argv[2])
rows = source.window(0, 0, int(source.listing.sizes[0])).refs
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
before = peak()
source.read(0, 0, len(rows) - 1)
print(peak() - before)
"""


def test_a_giant_row_group_is_never_held_whole(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(4000).hex()
    path = write(tmp_path / "a.parquet", [noise[i % 8000 :] + noise[: i % 8000] for i in range(24_000)])  # 190 MB
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 120  # MB: one chunk of 16 MiB, its buffers, and a batch
