"""Each document of an epoch belongs to one stream, in a new order each epoch, and a position leads straight to it."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import segments
from lightning_fms.data.segments import Segment, SourceOrder, Unsearchable
from lightning_fms.data.sources import Text, listing

Found = tuple[int, int, int, int]


@pytest.fixture(autouse=True, scope="module")
def _small_units() -> Iterator[None]:
    """Files of hundreds of bytes then have several fragments and windows, the last of each incomplete."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "WINDOW_BYTES", 64)
        patch.setattr(segments, "TURN_BYTES", 64)
        patch.setattr(listing, "FRAGMENT_BYTES", 200)
        yield


def write(folder: str, files: list[list[int]]) -> Text:
    """Files of lines of the given lengths."""
    for i, lengths in enumerate(files):
        Path(folder, f"{i}.txt").write_text("".join("x" * length + "\n" for length in lengths))
    return Text(folder, "line")


def walk(segment: Segment, position: int = 0) -> list[Found]:
    found = []
    while (document := segment.find(position)) is not None:
        assert document[0] >= position
        found.append(document)
        position = document[0] + 1
    return found


def all_of(source: Text) -> set[tuple[int, int, int]]:
    found = set()
    for file, size in enumerate(source.listing.sizes.tolist()):
        if size:
            window = source.window(file, 0, size)
            found |= set(zip([file] * len(window.starts), window.starts.tolist(), window.refs.tolist(), strict=True))
    return found


line_lengths = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 150)), max_size=30)
corpora = st.lists(line_lengths, min_size=1, max_size=5).filter(lambda files: any(map(any, files)))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(corpora, st.integers(1, 12), st.integers(0, 3), st.integers(1, 9), st.data())
def test_each_document_is_in_one_segment_and_found_from_its_position(
    files: list[list[int]], streams: int, epoch: int, shuffle_window: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(folder, files)
        order = SourceOrder(source, "web", seed=5, streams=streams)
        parts = [walk(order.segment(stream, epoch, shuffle_window)) for stream in range(streams)]
        read = Counter(document[1:] for part in parts for document in part)
        assert set(read) == all_of(source)
        assert set(read.values()) <= {1}
        for stream, part in enumerate(parts):
            positions = [document[0] for document in part]
            assert positions == sorted(set(positions))
            if part:
                start = data.draw(st.integers(0, len(part) - 1))
                fresh = SourceOrder(source, "web", 5, streams).segment(stream, epoch, shuffle_window)
                assert walk(fresh, positions[start]) == part[start:]
                segment = order.segment(stream, epoch, shuffle_window)
                for document in data.draw(st.permutations(part)):  # in any order, by one segment
                    assert segment.find(document[0]) == document
                    assert len(segment.read(*document[1:])) == document[3]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(corpora, st.integers(1, 12), st.integers(0, 3))
def test_segments_have_equal_bytes(files: list[list[int]], streams: int, epoch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(folder, files)
        order = SourceOrder(source, "web", 5, streams)
        covered: list[tuple[int, int, int]] = []
        for stream in range(streams):
            segment = order.segment(stream, epoch, 4)
            pieces = list(zip(segment._files, segment._starts, segment._stops, strict=True))
            assert all(start < stop for _, start, stop in pieces)
            covered += pieces
            share = sum(stop - start for _, start, stop in pieces)
            assert abs(share - source.listing.total_bytes / streams) < 1
        ends = [0] * len(files)
        for file, start, stop in sorted(covered):
            assert start == ends[file]
            ends[file] = stop
        assert ends == source.listing.sizes.tolist()


def documents(order: SourceOrder, stream: int, epoch: int, shuffle_window: int = 16) -> list[tuple[int, int, int]]:
    return [document[1:] for document in walk(order.segment(stream, epoch, shuffle_window))]


@pytest.fixture
def corpus(tmp_path: Path) -> Text:
    return write(str(tmp_path), [[5 + (i * 7 + j) % 9 for i in range(60)] for j in range(5)])


def test_every_epoch_has_a_new_order_and_other_segments(corpus: Text) -> None:
    order = SourceOrder(corpus, "web", 0, 4)
    epochs = [[documents(order, stream, epoch) for stream in range(4)] for epoch in range(3)]
    for one in range(3):
        assert sorted(itertools.chain(*epochs[one])) == sorted(all_of(corpus))
        for other in range(one):
            assert [set(part) for part in epochs[one]] != [set(part) for part in epochs[other]]
            both = zip(itertools.chain(*epochs[one]), itertools.chain(*epochs[other]), strict=True)
            same = sum(a == b for a, b in both)
            assert same < 15  # of 300; one is expected of two random orders


def test_within_a_window_documents_are_permuted_in_groups(corpus: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "WINDOW_BYTES", 1 << 20)
    order = SourceOrder(corpus, "web", 0, 1)
    in_file_order = {file: sorted(d for d in all_of(corpus) if d[0] == file) for file in range(5)}
    for width in (1, 8, 1000):
        walked = documents(order, 0, 0, width)
        for file, expected in in_file_order.items():
            of_file = [document for document in walked if document[0] == file]
            pieces = Counter(start // listing.FRAGMENT_BYTES for _, start, _ in expected)
            assert max(pieces.values()) > 8
            place = {document: i for i, document in enumerate(expected)}
            for fragment in pieces:
                places = [place[d] for d in of_file if d[1] // listing.FRAGMENT_BYTES == fragment]
                places = [p - min(places) for p in places]
                assert sorted(places) == list(range(len(places)))
                for group in range(0, len(places), width):
                    assert sorted(places[group : group + width]) == list(range(group, min(group + width, len(places))))
                if width == 1000:
                    assert places != sorted(places)


def test_orders_depend_on_seed_and_name_and_not_on_the_shuffle_window_of_others(corpus: Text) -> None:
    base = documents(SourceOrder(corpus, "web", 0, 2), 0, 0)
    assert documents(SourceOrder(corpus, "web", 0, 2), 0, 0) == base
    assert documents(SourceOrder(corpus, "web", 1, 2), 0, 0) != base
    assert documents(SourceOrder(corpus, "code", 0, 2), 0, 0) != base


def test_more_streams_than_bytes(tmp_path: Path) -> None:
    source = write(str(tmp_path), [[1, 1]])  # 4 bytes, 2 documents
    order = SourceOrder(source, "web", 0, 9)
    for epoch in range(5):
        parts = [documents(order, stream, epoch) for stream in range(9)]
        assert sorted(itertools.chain(*parts)) == [(0, 0, 1), (0, 2, 1)]
        assert max(map(len, parts)) == 1
    empty = next(order.segment(stream, 0, 4) for stream in range(9) if not documents(order, stream, 0))
    assert empty.find(0) is None


def test_epochs_can_be_asked_in_any_order(corpus: Text) -> None:
    order = SourceOrder(corpus, "web", 0, 2)
    first = {epoch: documents(order, 1, epoch) for epoch in range(6)}
    for epoch in np.random.default_rng(0).permutation(6).tolist():
        assert documents(order, 1, epoch) == first[epoch]


def test_every_epoch_and_every_window_has_an_order_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(listing, "FRAGMENT_BYTES", 1 << 20)
    order = SourceOrder(write(str(tmp_path), [[9] * 40, [9] * 40]), "web", 0, 1)
    seen = set()
    for epoch in range(3):
        walked = documents(order, 0, epoch, 100)
        for file in (0, 1):
            seen.add(tuple(start for of, start, _ in walked if of == file))
    assert len(seen) == 6


def test_small_files_are_read_in_turn_and_large_ones_alone(tmp_path: Path) -> None:
    """Windows of 64 bytes: files of 20, 20, 20, 63 (in turn, as far as a window reaches), and one of 160 bytes by itself."""
    source = write(str(tmp_path), [[4] * 4, [4] * 4, [4] * 4, [62], [4] * 32])
    segment = SourceOrder(source, "web", 1, 1).segment(0, 0, 16)
    walked = walk(segment)
    assert sorted(document[1:] for document in walked) == sorted(all_of(source))
    for window, found in itertools.groupby(walked, key=lambda document: document[0] >> 32):
        segment._open(window)
        files, count = [document[1] for document in found], len(segment._parts)
        assert len(set(files)) == count
        assert files[:count] == [int(segment._files[piece]) for piece, _, _ in segment._ranges]
        assert count == 1 or 4 not in files
    assert any(len({d[1] for d in walked if d[0] >> 32 == window}) > 1 for window in range(segment.windows))


def test_fragments_of_very_large_sources_grow_in_size_and_not_in_number() -> None:
    most, size_of = listing.MOST_FRAGMENTS, listing.FRAGMENT_BYTES
    for files, size in ((3, 1 << 30), (70_000, 4 << 30), (400_000, 1 << 30)):
        source = listing.Listing(Path("none"), tuple(map(str, range(files))), np.full(files, size, dtype=np.int64))
        file, start, length = source.fragments
        assert length.sum() == files * size
        assert len(file) <= most + files
        assert length.max() == size_of * max(1, -(-files * size // (size_of * most)))
        assert np.array_equal(start + length == size, np.append(start[1:] == 0, True))


def walk_over_holes(segment: Segment) -> tuple[list[Found], int]:
    """What can be read, and how many ranges cannot."""
    found, counted, position = [], 0, 0
    while True:
        try:
            document = segment.find(position)
        except Unsearchable as error:
            counted, position = counted + error.counts, error.behind
            continue
        if document is None:
            return found, counted
        found.append(document)
        position = document[0] + 1


def test_a_file_in_turn_that_cannot_be_read_is_a_hole_and_moves_nothing_else(tmp_path: Path) -> None:
    source = write(str(tmp_path), [[1] * (3 + i) for i in range(6)])
    whole = walk(SourceOrder(source, "web", 1, 1).segment(0, 0, 4))
    for gone in range(6):
        path = source.listing.path(gone)
        assert isinstance(path, Path)
        data = path.read_bytes()
        path.write_bytes(b"")
        segment = SourceOrder(Text(source.listing, "line"), "web", 1, 1).segment(0, 0, 4)
        found, counted = walk_over_holes(segment)
        path.write_bytes(data)
        assert found == [document for document in whole if document[1] != gone]
        assert counted == 1
        for at in [document[0] for document in whole if document[1] == gone]:  # and wherever a stream comes back to it
            segment = SourceOrder(source, "web", 1, 1).segment(0, 0, 4)
            path.write_bytes(b"")
            segment._source = Text(source.listing, "line")
            longest = max(3 + i for i in range(6) if i != gone)
            with pytest.raises(Unsearchable, match="ends at byte 0") as caught:
                segment.find(at)
            # A stream that has just read all the others may have been told before.
            assert caught.value.counts == (at // 6 == 0 or at > 6 * longest)
            path.write_bytes(data)


def test_what_is_found_at_a_position_does_not_depend_on_how_a_stream_got_there(tmp_path: Path) -> None:
    source = write(str(tmp_path), [[1] * (3 + i) for i in range(6)])
    gone = source.listing.path(2)
    assert isinstance(gone, Path)
    gone.write_bytes(b"")
    source = Text(source.listing, "line")
    walked = SourceOrder(source, "web", 1, 1).segment(0, 0, 4)

    def found(segment: Segment, position: int) -> object:
        try:
            return segment.find(position)
        except Unsearchable as error:
            return error.behind

    for position in range(6 * 8 + 1):
        at_once = SourceOrder(source, "web", 1, 1).segment(0, 0, 4)
        assert found(walked, position) == found(at_once, position)
