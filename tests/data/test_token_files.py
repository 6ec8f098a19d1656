"""Bare token files and Megatron's indexed ones: every document once, whatever the cuts, and exactly as it was written."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fms.data import StreamLoader
from lightning_fms.data.sources import DocumentError, MegatronTokens, Source, TokenFiles, open_source, token_files
from tests.data.cuts import read_all

EOS = 7
CODES = {np.uint8: 1, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def documents(source: Source, cuts: list[int] | None = None) -> list[list[int]]:
    found = []
    for file in range(len(source.listing.names)):
        for document in read_all(source, cuts, file):
            assert isinstance(document, np.ndarray)
            found.append(document.tolist())
    return found


def write(path: Path, ids: list[int], dtype: str = "uint16", magic: int | None = None, version: int = 1) -> Path:
    header = b"" if magic is None else np.array([magic, version, len(ids)] + [0] * 253, dtype="<i4").tobytes()
    path.write_bytes(header + np.array(ids, dtype=dtype).tobytes())
    return path


def write_megatron(prefix: Path, texts: list[list[list[int]]], dtype: type = np.uint16, modes: bool = False) -> Path:
    """Write documents of sequences of ids as Megatron does."""
    sequences = [sequence for document in texts for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    pointers = np.concatenate(([0], ends))[: len(sequences)].astype(np.int64)
    starts = np.cumsum([0] + [len(document) for document in texts], dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(sequences), len(starts))
    arrays = b"".join(array.tobytes() for array in (lengths, pointers, starts))
    prefix.with_suffix(".idx").write_bytes(header + arrays + b"\x00" * (len(sequences) if modes else 0))
    prefix.with_suffix(".bin").write_bytes(np.array([i for s in sequences for i in s], dtype=dtype).tobytes())
    return prefix.with_suffix(".bin")


# -- bare files -----------------------------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 9), max_size=60)


def cut(tokens: list[int], first: bool) -> list[list[int]]:
    """The documents of a line of tokens: `EOS` is the last token of each, or the first."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        if first and token == EOS:
            parts.append([])
        parts[-1].append(token)
        if not first and token == EOS:
            parts.append([])
    return [part for part in parts if part]


@settings(deadline=None, max_examples=60)
@given(tokens=ids, dtype=st.sampled_from(["uint16", "int32"]), magic=st.booleans(), first=st.booleans(), data=st.data())
def test_every_cut_gives_each_document_once(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[int],
    dtype: str,
    magic: bool,
    first: bool,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("bin") / "a.bin"
    tokens = tokens or [1]
    if magic:
        write(path, tokens, magic=20240520)
    else:
        write(path, tokens, dtype)
    option = {"bos_id": EOS} if first else {"eos_id": EOS}
    source = open_source(path, **({} if magic else {"dtype": dtype}), **option)
    assert isinstance(source, TokenFiles)
    assert documents(source) == cut(tokens, first)
    size = path.stat().st_size
    cuts = data.draw(st.lists(st.integers(max(0, size - 130), size), max_size=12))
    assert documents(source, cuts) == cut(tokens, first)
    assert documents(source, list(range(size))) == cut(tokens, first)


def test_the_end_of_a_document_is_found_far_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_LOOK_AHEAD", 4)
    tokens = [1] * 50 + [EOS] + [2] * 30
    for option, first in (("eos_id", False), ("bos_id", True)):
        source = open_source(write(tmp_path / "a.bin", tokens), **{option: EOS})
        assert documents(source, [2, 3, 8]) == cut(tokens, first)


def test_without_a_special_token_blocks_lose_nothing(tmp_path: Path) -> None:
    tokens = np.arange(3 * token_files.BLOCK_TOKENS - 5) % 50_000
    for magic in (None, 20240520):
        source = open_source(write(tmp_path / "a.bin", tokens.tolist(), magic=magic))
        for cuts in ([], [1, 2, 131_071, 131_073, 200_001], list(range(0, 400_000, 4_097))):
            found = documents(source, cuts)
            assert [len(block) for block in found] == [65_536, 65_536, 65_531]
            assert np.array_equal(np.concatenate(found), tokens)


def test_tokens_of_llama_3_have_a_header_too(tmp_path: Path) -> None:
    source = open_source(
        write(tmp_path / "a.bin", [128_000, 5, 128_000], "uint32", magic=20240801, version=7), bos_id=128_000
    )
    assert documents(source) == [[128_000, 5], [128_000]]


def test_files_of_a_folder_may_be_empty_or_one_token_long(tmp_path: Path) -> None:
    for name, tokens in (("a", []), ("b", [3]), ("c", [EOS, 4])):
        write(tmp_path / f"{name}.bin", tokens)
    assert documents(open_source(tmp_path, eos_id=EOS)) == [[3], [EOS], [4]]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"abc", {}, "has 3 bytes, no whole number of uint16 tokens; set dtype"),
        (b"abcdef", {"dtype": "int32"}, "no whole number of int32"),
        (b"ab", {"dtype": "float32"}, "dtype='float32' must be one of uint8"),
        (b"ab", {"eos_id": 1, "bos_id": 1}, "eos_id=1 and bos_id=1: a document is cut at one of them"),
        (b"ab", {"text_key": "t"}, "text_key='t' does not apply to token files"),
        (
            np.array([20240520, 2, 0] + [0] * 253, "<i4").tobytes(),
            {},
            "version 2; known is version 1, with uint16 tokens",
        ),
        (np.array([20240520, 1, 0] + [0] * 253, "<i4").tobytes(), {"dtype": "int32"}, r"uint16 tokens \(dtype=int32\)"),
        (np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes(), {}, "counts 9 tokens, 1,042 bytes, and it has 1,024"),
    ],
)
def test_one_clear_error_for_what_does_not_fit(tmp_path: Path, content: bytes, options: dict, words: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        open_source(tmp_path / "a.bin", **options)


def test_a_file_cut_after_the_listing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", [1, EOS, 2, EOS])
    source = open_source(path, eos_id=EOS)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DocumentError, match=f"{path}: ends at byte 6, before byte 8"):
        documents(source)


# -- Megatron ----------------------------------------------------------------------------------------------------------

TEXTS = [[[1, 2, 3]], [[4]], [[], [5, 6], [7]], [], [[]], [[8] * 40, [9] * 3]]


def flat(texts: list[list[list[int]]]) -> list[list[int]]:
    return [found for text in texts if (found := [token for sequence in text for token in sequence])]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=4), max_size=12),
    dtype=st.sampled_from(list(CODES)), modes=st.booleans(), data=st.data(),
)  # fmt: skip
def test_every_cut_gives_each_megatron_document_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list, dtype: type, modes: bool, data: st.DataObject
) -> None:
    texts = [*texts, [[1]]]
    path = write_megatron(tmp_path_factory.mktemp("megatron") / "a", texts, dtype, modes)
    source = open_source(path)
    assert isinstance(source, MegatronTokens)
    size = path.stat().st_size
    for cuts in ([], data.draw(st.lists(st.integers(0, size), max_size=8)), list(range(size))):
        found = documents(source, cuts)
        assert [tokens for tokens in found if tokens] == flat(texts)


@pytest.mark.parametrize("path", [".", "*.bin", "*"])
def test_a_folder_or_a_glob_of_megatron_files(tmp_path: Path, path: str) -> None:
    for name in ("a", "b.part"):
        write_megatron(tmp_path / f"{name}.x", TEXTS)
    source = open_source(str(tmp_path / path))
    assert [name[-4:] for name in source.listing.names] == [".bin", ".bin"]
    assert [tokens for tokens in documents(source) if tokens] == 2 * flat(TEXTS)


def test_an_index_or_its_tokens_missing(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", TEXTS)
    write(tmp_path / "b.bin", [1, 2])
    with pytest.raises(ValueError, match=r"b.bin: has no .idx file, and a.bin has"):
        open_source(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"a.idx: its .bin file is not among the files"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match=r"b.idx: the index of a .bin file is missing"):
        MegatronTokens(tmp_path / "b.bin")


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"X", "begins with b'XMIDIDX.* not with a Megatron index"),
        (9, b"\x02", "version 2, not with a Megatron index of version 1"),
        (17, b"\x07", "tokens of type code 7; known are the integers"),
        (18, b"\xff", "where 255 sequences and 6 documents take"),
        (26, b"\xff", "where 8 sequences and 254 documents take"),
        (34 + 12 * 8, b"\x01", r"has documents from sequence \[1, 8\] where there are 8 sequences"),
        (34 + 4 * 7, b"\x09", r"says that its .bin file has 112 bytes, and it has 100"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, at: int, data: bytes, words: str) -> None:
    path = write_megatron(tmp_path / "a", TEXTS)
    patch(path.with_suffix(".idx"), at, data)
    with pytest.raises(ValueError, match=f"a.idx: .*{words}.*; write the index again, or restore it"):
        open_source(path)


@pytest.mark.parametrize(
    ("at", "words"), [(34 + 4 * 8 + 8, "do not follow each other"), (34 + 12 * 8 + 8, "out of order")]
)
def test_an_index_broken_in_the_middle(tmp_path: Path, at: int, words: str) -> None:
    path = write_megatron(tmp_path / "a", TEXTS)
    patch(path.with_suffix(".idx"), at, b"\x07")
    with pytest.raises(DocumentError, match=f"a.idx: .*{words}"):
        documents(open_source(path))


def test_cut_files(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", TEXTS)
    source, whole, index = open_source(path), path.read_bytes(), path.with_suffix(".idx")
    path.write_bytes(whole[:-2])
    with pytest.raises(DocumentError, match=r"a.bin: ends at byte 98, before byte 100"):
        documents(source)
    with pytest.raises(ValueError, match=r"a.idx: says that its .bin file has 100 bytes, and it has 98"):
        open_source(path)
    path.write_bytes(whole)
    for size in (0, 20, index.stat().st_size - 1):
        index.write_bytes(index.read_bytes()[:size] if size else b"")
        with pytest.raises(ValueError, match=r"a.idx: has .* bytes"):
            open_source(path)
        write_megatron(tmp_path / "a", TEXTS)


def test_options_belong_to_bare_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype='int32' does not apply to Megatron's"):
        open_source(write_megatron(tmp_path / "a", TEXTS), dtype="int32")


def test_the_loader_reads_both(tmp_path: Path) -> None:
    """Each token of an epoch is an input once, whichever form it is stored in."""
    texts = [[[number % 200 + 1] * (number % 5 + 1)] for number in range(400)]
    tokens = [token for text in flat(texts) for token in [*text, 256]]
    forms = {
        "megatron": {"path": write_megatron(tmp_path / "m", texts)},
        "bare": {"path": write(tmp_path / "b.bin", tokens), "eos_id": 256},
    }
    for name, form in forms.items():
        loader = StreamLoader({name: form}, seq_len=16, global_batch_size=4)
        taken: list[int] = []
        for batch in loader:
            taken += batch["input_ids"].flatten().tolist()
            if len(taken) >= 3 * len(tokens):
                break
        counts = np.bincount(taken, minlength=257)[1:201].clip(1) / np.bincount(tokens, minlength=257)[1:201]
        assert 2 <= counts.min() <= counts.max() <= 4
