"""Every format gives each document exactly once, whatever the cuts, and as it was written."""

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.data.cuts
from lightning_fms.data.sources import JsonLines, PythonSource, Source, Text, list_files, open_source, open_sources
from lightning_fms.data.sources.lines import BLOCK_BYTES


def documents(source: Source, cuts: list[int] | None = None, file: int = 0) -> list[tuple[int, str]]:
    """`(first byte, text)` of a file's documents, looked for in the ranges between the cuts."""
    found = []
    for first, _, text in tests.data.cuts.documents(source, cuts, file):
        assert isinstance(text, str)
        found.append((first, text))
    assert [first for first, _ in found] == sorted({first for first, _ in found})
    return found


def texts(source: Source, cuts: list[int] | None = None, file: int = 0) -> list[str]:
    return [text for _, text in documents(source, cuts, file)]


def records(*values: str, end: str = "\n", ascii_only: bool = False) -> bytes:
    return "".join(json.dumps({"text": value}, ensure_ascii=ascii_only) + end for value in values).encode()


ODD = ["plain", "a\u2028b\u2029c", "next\x85line", 'tab\tand "quote"', "new\nline\r\ncarriage\rreturn", "", "ü€😀", " "]


# -- JSON lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(records(*ODD), ODD, id="odd characters"),
        pytest.param(records(*ODD, ascii_only=True), ODD, id="escaped"),
        pytest.param(records(*ODD, end="\r\n"), ODD, id="CRLF"),
        pytest.param(records(*ODD, end="\r\r\n"), ODD, id="CRCRLF"),
        pytest.param(b"\xef\xbb\xbf" + records(*ODD), ODD, id="byte-order mark"),
        pytest.param(records(*ODD).removesuffix(b"\n"), ODD, id="no final newline"),
        pytest.param(records(*ODD, end="\r\n").removesuffix(b"\n"), ODD, id="no final newline after CR"),
        pytest.param(
            b"\n\n" + records("a", end="\n\n\n") + b"\r\n" + records("b") + b"\n", ["a", "b"], id="empty lines"
        ),
        pytest.param(records("a") + b" \t\n" + records("b"), ["a", "", "b"], id="a blank line is an empty document"),
        pytest.param(b"\xef\xbb\xbf\n" + records("a"), ["", "a"], id="a byte-order mark alone"),
        pytest.param(b'{"text": "half \\ud83d pair"}\n', ["half \ud83d pair"], id="half a surrogate pair"),
    ],
)
def test_json_lines_at_every_cut(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(data)
    source = JsonLines(path)
    whole = documents(source)
    assert [text for _, text in whole] == expected
    for cut in range(1, len(data)):
        assert documents(source, [cut]) == whole
    assert documents(source, list(range(len(data)))) == whole


def test_a_blank_file_among_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(records("a"))
    (tmp_path / "b.jsonl").write_bytes(b"\n\n\r\n\n")
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "d.jsonl").write_bytes(records("d"))
    source = JsonLines(tmp_path)
    assert [texts(source, file=file) for file in (0, 1, 3)] == [["a"], [], ["d"]]
    file, _, size = source.listing.fragments
    assert file.tolist() == [0, 1, 3]  # an empty file is no fragment
    assert size.sum() == source.listing.total_bytes


def test_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "words"}\n')
    assert texts(open_source(tmp_path, text_key="body")) == ["words"]


# -- text -----------------------------------------------------------------------------------------------------------------

pieces = st.lists(st.sampled_from(["a", "bc", "\n", "\r", "\r\n", "\u2028", "ü", "\x85", " "]), max_size=40).map(
    "".join
)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(pieces.filter(len), st.booleans(), st.lists(st.integers(1, 80), max_size=5))
def test_lines_at_random_cuts(content: str, marked: bool, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.txt")
        path.write_bytes(b"\xef\xbb\xbf" * marked + content.encode())
        source = Text(path, "line")
        expected = [line.removesuffix("\r") for line in content.split("\n")]
        assert [text for text in texts(source, cuts) if text] == [line for line in expected if line]
        assert documents(source, cuts) == documents(source)
        assert "".join(texts(Text(path), cuts)) == content


def block_file(path: Path, seed: int, line_lengths: tuple[int, ...], size: int) -> bytes:
    rng = random.Random(seed)
    out = b""
    while len(out) < size:
        out += bytes(rng.choices(b"abc ", k=rng.choice(line_lengths))) + b"\n"
    path.write_bytes(out)
    return out


@pytest.mark.parametrize(
    "line_lengths",
    [pytest.param((0, 20, 80), id="short lines"), pytest.param((3, 30_000), id="long lines"),
     pytest.param((10, BLOCK_BYTES - 1, 3 * BLOCK_BYTES), id="lines longer than a block")],
)  # fmt: skip
def test_blocks_lose_nothing_at_any_cut(tmp_path: Path, line_lengths: tuple[int, ...]) -> None:
    data = block_file(tmp_path / "data.txt", 0, line_lengths, 5 * BLOCK_BYTES)
    source = Text(tmp_path / "data.txt")
    whole = documents(source)
    assert "".join(text for _, text in whole).encode() == data
    assert all(text.endswith("\n") for _, text in whole)
    assert len(whole) >= 2
    rng = random.Random(1)
    edges = [first + near for first, _ in whole for near in (-1, 0, 1)]
    marks = [mark + near for mark in range(0, len(data), BLOCK_BYTES) for near in (-1, 0, 1)]
    for cut in [*edges, *marks, *(rng.randrange(len(data)) for _ in range(30))]:
        assert documents(source, [cut]) == whole
    assert documents(source, [*edges, *marks]) == whole


def test_blocks_are_about_64_kib(tmp_path: Path) -> None:
    block_file(tmp_path / "data.txt", 0, (0, 20, 80), 20 * BLOCK_BYTES)
    sizes = [len(text) for text in texts(Text(tmp_path / "data.txt"))]
    assert all(BLOCK_BYTES - 100 < size < BLOCK_BYTES + 100 for size in sizes[:-1])


def test_a_small_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_bytes(b"one\ntwo\r\n\nthree\r")
    assert texts(Text(tmp_path / "data.txt")) == ["one\ntwo\r\n\nthree\r"]


def test_a_file_without_any_newline_is_one_document_found_in_linear_time(tmp_path: Path) -> None:
    size = 32 << 20
    (tmp_path / "data.txt").write_bytes(b"x" * size)
    source = Text(tmp_path / "data.txt")
    start = time.perf_counter()
    window = source.window(0, 0, size)
    assert time.perf_counter() - start < 2  # once through the file; from every mark anew would be 8 GB
    assert (window.starts.tolist(), window.refs.tolist()) == ([0], [size])
    rest = documents(source, list(range(0, size, 4 << 20)))
    assert [(first, len(text)) for first, text in rest] == [(0, size)]


# -- Python ---------------------------------------------------------------------------------------------------------------

LONG = "It explains what the function does, in enough words that a reader learns something, and then in a few more of them."


def python_tree(root: Path) -> Path:
    (root / "sub" / "tests").mkdir(parents=True)
    (root / "__pycache__").mkdir()
    (root / "a.py").write_text(
        f'"""Module. {LONG}"""\n\ndef f():\n    """Short."""\n\nclass C:\n    """Class.\n\n    {LONG}\n    """\n'
        f"    async def m(self):\n        'Method. {LONG}'\n\nTOPICS = {{'x': 'Topic. {LONG}', 'y': 3}}\n"
    )
    (root / "sub" / "b.py").write_bytes(f"# no docstring\rx = '\\d'  # invalid escape\r'''{LONG}'''\n".encode())
    (root / "sub" / "c.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "sub" / "tests" / "skipped.py").write_text(f'"""{LONG}"""\n')
    (root / "__pycache__" / "skipped.py").write_text(f'"""{LONG}"""\n')
    (root / "empty.py").touch()
    return root


def test_docstrings_and_topics_are_prose(tmp_path: Path) -> None:
    source = PythonSource("docstrings", python_tree(tmp_path))
    assert source.listing.names == ("a.py", "empty.py", "sub/b.py", "sub/c.py")
    whole = documents(source)
    assert [text.split(".")[0] for _, text in whole] == ["Module", "Class", "Method", "Topic"]
    assert whole[1][1] == f"Class.\n\n{LONG}"
    data = (tmp_path / "a.py").read_bytes()
    assert all(data[first : first + 1] in b"\"'" for first, _ in whole)
    for cut in range(1, len(data), 7):
        assert documents(source, [cut]) == whole
    assert texts(source, file=2) == []


def test_files_are_code(tmp_path: Path) -> None:
    source = PythonSource("code", python_tree(tmp_path))
    assert texts(source, [5, 100]) == [(tmp_path / "a.py").read_text()]
    assert texts(source, file=3) == ["# -*- coding: latin-1 -*-\nname = 'é'\n"]
    file, start, size = source.listing.fragments
    assert file.tolist() == [0, 2, 3]
    assert start.tolist() == [0, 0, 0]
    assert size.tolist() == source.listing.sizes[[0, 2, 3]].tolist()


def test_the_standard_library_is_listed_quickly_and_not_parsed() -> None:
    start = time.perf_counter()
    source = PythonSource("docstrings")
    assert time.perf_counter() - start < 2
    assert len(source.listing.names) > 300
    assert "pydoc_data/topics.py" in source.listing.names
    assert not any("site-packages" in name or "/tests/" in name for name in source.listing.names)
    topics = texts(source, file=source.listing.names.index("pydoc_data/topics.py"))
    assert sum(map(len, topics)) > 300_000


def test_kinds_and_roots_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind='prose' must be 'docstrings' or 'code'"):
        PythonSource("prose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"holds no \.py file; set root"):
        PythonSource("code", tmp_path)


# -- listing --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.jsonl",
        "a.jsonl",
        "sub/c.jsonl",
        "sub/.hidden.jsonl",
        "_temporary/d.jsonl",
        ".git/e.jsonl",
        "n[1].jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(records(name))
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (lambda t: t, ["a.jsonl", "b.jsonl", "n[1].jsonl", "sub/c.jsonl"]),
        (lambda t: str(t), ["a.jsonl", "b.jsonl", "n[1].jsonl", "sub/c.jsonl"]),
        (lambda t: t / "*.jsonl", ["a.jsonl", "b.jsonl", "n[1].jsonl"]),
        (lambda t: t / "**/*.jsonl", ["a.jsonl", "b.jsonl", "n[1].jsonl", "sub/c.jsonl"]),
        (lambda t: t / "[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        (lambda t: t / "n[1].jsonl", ["n[1].jsonl"]),
        (lambda t: [t / "b.jsonl", t / "a.jsonl", t / "[a].jsonl"], ["a.jsonl", "b.jsonl"]),
        (lambda t: [t / "sub", t / "a.jsonl"], ["a.jsonl", "sub/c.jsonl"]),
        (lambda t: t / "sub" / ".hidden.jsonl", [".hidden.jsonl"]),
        (lambda t: t / "_temporary", ["d.jsonl"]),
        (lambda t: t / "_temporary" / "*", ["d.jsonl"]),
    ],
)  # fmt: skip
def test_what_a_path_stands_for(tree: Path, paths: Callable[[Path], str], names: list[str]) -> None:
    listing = list_files(paths(tree))
    assert list(listing.names) == names
    assert [listing.path(i).stat().st_size for i in range(len(names))] == listing.sizes.tolist()


def test_linked_folders_are_read_and_a_folder_reached_twice_counts_once(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "z.jsonl").write_text('{"text": "z"}\n')
    before = list_files(tree).names
    (tree / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(tree)
    (tree / "zz_again").symlink_to(elsewhere)
    assert sorted(list_files(tree).names) == sorted([*before, "linked/z.jsonl"])


def test_a_home_folder_and_a_relative_path(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    monkeypatch.chdir(tree / "sub")
    assert list_files("~/a.jsonl").path(0) == tree / "a.jsonl"
    assert list_files("c.jsonl").path(0) == tree / "sub" / "c.jsonl"


def test_the_digest_follows_names_and_sizes_and_not_the_place(tree: Path) -> None:
    digest = list_files(tree).digest
    moved = tree.rename(tree.with_name("moved"))
    assert list_files(moved).digest == digest
    assert list_files([moved / "sub" / "c.jsonl", *moved.glob("*.jsonl")]).digest == digest
    (moved / "a.jsonl").write_bytes(records("longer than before"))
    assert list_files(moved).digest != digest


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 300 << 20), min_size=1, max_size=6).filter(any), st.booleans())
def test_fragments_cover_every_byte_once(sizes: list[int], splittable: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for i, size in enumerate(sizes):
            with Path(folder, f"{i}.jsonl").open("wb") as file:
                file.truncate(size)
        ends = [0] * len(sizes)
        for file_index, start, size in zip(*list_files(folder, splittable).fragments, strict=True):
            assert start == ends[file_index]
            assert size > 0
            assert size <= 64 << 20 or not splittable
            ends[file_index] += size
        assert ends == sizes


def test_formats_follow_from_names(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_bytes(records("a"))
    (tmp_path / "b.md").write_text("b\n")
    sources, weights = open_sources(
        {
            "a": {"path": tmp_path / "a.JSONL", "weight": 2},
            "b": {"path": [tmp_path / "b.md"], "weight": 1, "split": "line"},
        }
    )
    assert isinstance(sources["a"], JsonLines)
    assert isinstance(sources["b"], Text)
    assert sources["b"].split == "line"
    assert weights == {"a": 2, "b": 1}
    assert open_source(sources["a"]) is sources["a"]


def test_python_source_of_an_installed_package():
    source = PythonSource("code", package="lightning_fms")
    assert "__init__.py" in source.listing.names
    with pytest.raises(ValueError, match="package='no_such_package' is not an installed package"):
        PythonSource("code", package="no_such_package")
    with pytest.raises(ValueError, match="two places"):
        PythonSource("code", root=".", package="lightning_fms")


def test_a_file_spelled_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_text('{"text": "x"}\n')
    listing = list_files([tmp_path / "c" / "a.jsonl", tmp_path / "c" / ".." / "c" / "a.jsonl"])
    assert listing.names == ("a.jsonl",)
