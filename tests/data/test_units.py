"""Decoded units are litdata chunks: stock litdata reads them, and no chunk is larger than it should be."""

from pathlib import Path

import pytest
from litdata import StreamingDataset

from lightning_fms.data.sources import Cache, DocumentError, units
from lightning_fms.data.sources.cache import cache_key
from lightning_fms.data.sources.units import Broken, Units, write_unit

KEY = cache_key("unit", 1)
TEXTS = ["a", "", "ü€😀\u2028", "x" * 300, *(str(i) for i in range(50))]


def read(folder: Path, items: list, pickled: bool) -> list:
    reader = Units(Cache(folder))

    def write(entry: Path) -> None:
        write_unit(entry, items, pickled)

    assert reader.rows(KEY, write) == len(items)
    return [reader.read(KEY, row, write) for row in range(len(items))]


@pytest.mark.parametrize("chunk", [64 << 20, 100])
@pytest.mark.parametrize(
    ("items", "pickled"),
    [(TEXTS, False), ([{"a": 1, "b": None}, {"b": [b"\0\xff"], "c": {"d": "x"}}, {}] * 9, True)],
)
def test_stock_litdata_reads_the_same(
    tmp_path: Path, items: list, pickled: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "CHUNK_BYTES", chunk)
    assert read(tmp_path, items, pickled) == items
    (index,) = tmp_path.rglob("index.json")
    sizes = [path.stat().st_size for path in index.parent.glob("chunk-*.bin")]
    assert len(sizes) == 1 or len(sizes) > 3
    assert max(sizes) <= max(chunk, 400)
    dataset = StreamingDataset(str(index.parent))
    assert [dataset[i] for i in range(len(dataset))] == items


def test_broken_documents_keep_their_places(tmp_path: Path) -> None:
    reader = Units(Cache(tmp_path))

    def write(entry: Path) -> None:
        write_unit(entry, ["a", DocumentError("odd"), "c", Broken(3, "rows 3 to 5"), "g"], pickled=False)

    assert reader.rows(KEY, write) == 7
    for opened in (reader, Units(Cache(tmp_path))):
        for row, found in enumerate(["a", None, "c", None, None, None, "g"]):
            if found is not None:
                assert opened.read(KEY, row, write) == found
                continue
            with pytest.raises(DocumentError, match=r"^odd$" if row == 1 else r"^rows 3 to 5$"):
                opened.read(KEY, row, write)


def test_a_unit_of_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, [], pickled=False) == []
