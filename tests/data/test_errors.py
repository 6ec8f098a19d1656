"""What is wrong with a file is said once, with the file, the place and the way out."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fms.data import StreamLoader
from lightning_fms.data.cursor import Columns
from lightning_fms.data.packing import Concat
from lightning_fms.data.sources import DocumentError, JsonLines, PythonSource, Source, Text, list_files, open_sources
from lightning_fms.data.stream import Recipe, Stream
from lightning_fms.data.tokenizer import ByteTokenizer


def all_documents(source: Source) -> list:
    found = []
    for file, size in enumerate(source.listing.sizes.tolist()):
        window = source.window(file, 0, size)
        found += [
            source.read(file, int(start), int(length)) for start, length in zip(window.starts, window.refs, strict=True)
        ]
    return found


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "not valid JSON .* at character 12"),
        ('{"text":"a"}{"text":"b"}', "not valid JSON .*Extra data at character 12"),
        ('{"txt": "a", "id": 3}', "has no key 'text'; it has 'txt', 'id': set text_key to one of them"),
        ("{}", "has no key 'text'; it has none"),
        ('{"text": null}', "has 'text' of type NoneType; it must be a string"),
        ('{"text": ["a"]}', "has 'text' of type list"),
        ('["a"]', "is a list, not an object with a key 'text'"),
        ("null", "is a NoneType"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "cannot be read .*digits"),
        ("[" * 100_000, "cannot be read .*recursion"),
    ],
)
def test_a_bad_record_names_file_and_byte(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps({"text": "fine"}) + "\n"
    path.write_text(good + line + "\n" + good)
    with pytest.raises(DocumentError, match=words) as error:
        all_documents(JsonLines(path))
    assert str(error.value).startswith(f"{path}: the record at byte {len(good)} ")


def test_bytes_that_are_no_utf8_name_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"\xef\xbb\xbffine\nbad \xff here\n")
    for split, byte in (("block", 12), ("line", 12)):
        with pytest.raises(DocumentError, match=f"{path}: byte {byte} is not valid UTF-8 .*convert the file"):
            all_documents(Text(path, split))


def test_a_stream_names_the_source(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": 3}\n')
    sources, _ = open_sources({"web": tmp_path / "data.jsonl"})
    columns = Columns(["web"])
    recipe = Recipe(sources, columns, ByteTokenizer(), [(0, {"web": 1.0})], Concat(8), seed=0, streams=1)
    with pytest.raises(DocumentError, match=r"^source 'web': .*data.jsonl: the record at byte 0 .* int"):
        Stream(0, recipe, columns.fresh(1, 16)[0]).next_row(0)


def test_a_source_without_a_token_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": ""}\n' * 3)
    sources, _ = open_sources({"web": tmp_path})
    columns = Columns(["web"])
    recipe = Recipe(sources, columns, ByteTokenizer(), [(0, {"web": 1.0})], Concat(8), seed=0, streams=2)
    with pytest.raises(ValueError, match="source 'web': no document with a token"):
        Stream(0, recipe, columns.fresh(2, 16)[0]).next_row(0)


# -- files that change after the listing --------------------------------------------------------------------------------


def jsonl(path: Path) -> JsonLines:
    path.write_text("".join(json.dumps({"text": "x" * 50}) + "\n" for _ in range(20)))
    return JsonLines(path)


def lines(path: Path) -> Text:
    path.write_text("some words\n" * 100)
    return Text(path, "line")


def blocks(path: Path) -> Text:
    path.write_text("some words\n" * 20_000)
    return Text(path)


@pytest.mark.parametrize("make", [jsonl, lines, blocks])
def test_a_file_cut_after_the_listing_is_an_error(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    source = make(path := tmp_path / "data.jsonl")
    size = path.stat().st_size
    window = source.window(0, 0, size)
    os.truncate(path, size // 2)
    words = f"{path}: ends at byte {size // 2}, before .* it was cut or replaced .* restore it"
    with pytest.raises(DocumentError, match=words):
        source.window(0, 0, size)
    with pytest.raises(DocumentError, match=words):
        source.read(0, int(window.starts[-1]), int(window.refs[-1]))


def test_a_line_that_was_cut_behind_its_window_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("short\n" + "long " * 100 + "\n")
    source = Text(path, "line")
    os.truncate(path, 100)
    with pytest.raises(DocumentError, match="ends at byte 100"):
        source.window(0, 0, 20)


@pytest.mark.parametrize("make", [jsonl, lines, blocks])
def test_what_is_appended_after_the_listing_is_not_read(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    source = make(path := tmp_path / "data.jsonl")
    os.truncate(path, path.stat().st_size - 1)  # no newline at the end
    source = type(source)(path, *([source.split] if isinstance(source, Text) else []))
    before = all_documents(source)
    with path.open("a") as file:
        file.write(" and more\nlines\n")
    assert all_documents(source) == before


def test_a_file_removed_after_the_listing_is_an_error(tmp_path: Path) -> None:
    source = lines(path := tmp_path / "data.txt")
    path.unlink()
    with pytest.raises(DocumentError, match=f"{path}: cannot be read at byte 0 .No such file"):
        source.window(0, 0, 10)


def test_python_that_does_not_parse_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(DocumentError, match=r"bad.py: cannot be read as Python"):
        all_documents(PythonSource("docstrings", tmp_path))
    (tmp_path / "bad.py").write_bytes(b"# \xff\n")
    with pytest.raises(DocumentError, match=r"bad.py: cannot be read as Python"):
        all_documents(PythonSource("code", tmp_path))


# -- paths -------------------------------------------------------------------------------------------------------------


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing.jsonl: no such file or folder"):
        list_files(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="the folder holds no data file"):
        list_files(tmp_path)
    with pytest.raises(ValueError, match=r"\*.jsonl: the glob matches no file"):
        list_files(tmp_path / "*.jsonl")
    with pytest.raises(ValueError, match="list of paths is empty"):
        list_files([])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").touch()
    with pytest.raises(ValueError, match="all 2 files are empty"):
        list_files(tmp_path)


def message_as_nobody(call: Callable[[], object]) -> str:
    """What a call raises for a user who may not read everything: root may."""
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            message = f"no error: {call()!r}"
        except ValueError as error:
            message = str(error)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(begin, message.encode())
        os._exit(0)
    os.close(begin)
    os.waitpid(child, 0)
    with os.fdopen(end) as pipe:
        return pipe.read()


def test_what_may_not_be_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder, secret = Path(name, "data"), Path(name, "data", "secret")
        secret.mkdir(parents=True)
        path = folder / "a.jsonl"
        path.write_text('{"text": "a"}\n')
        path.chmod(0)
        assert message_as_nobody(lambda: list_files(path)) == f"{path}: cannot be read; check its permissions"
        path.chmod(0o644)
        secret.chmod(0)
        message = message_as_nobody(lambda: list_files(folder))
        assert message == f"{secret}: cannot be listed (Permission denied); check its permissions"
        message = message_as_nobody(lambda: list_files(secret / "b.jsonl"))
        assert message == f"{secret / 'b.jsonl'}: cannot be listed (Permission denied); check its permissions"
        secret.chmod(0o755)


# -- the `sources` argument ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.txt").write_text("b\n")
    (tmp_path / "c.xyz").write_text("c\n")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "mixes formats .'.jsonl', '.txt', '.xyz'.; a source has one, so name the files by a glob"),
        ("c.xyz", r"unknown format \['.xyz'\]; known are .jsonl"),
        ({"path": "a.jsonl", "split": "line"}, "split='line' does not apply to JSON lines; remove it"),
        ({"path": "b.txt", "text_key": "x"}, "text_key='x' does not apply to plain text; remove it"),
        ({"path": "b.txt", "split": "word"}, "split='word' must be 'block' or 'line'"),
        ({"text_key": "x"}, "has no path; it has .'text_key'."),
        ({"path": "a.jsonl", "textkey": "x"}, "'textkey' is no option of a source; they are weight, .*text_key"),
        ("nowhere", "no such file or folder"),
    ],
)
def test_a_bad_source_is_named(folder: Path, spec: str | dict, words: str) -> None:
    if isinstance(spec, str):
        spec = {"path": spec}
    if "path" in spec:
        spec = {**spec, "path": folder / spec["path"]}
    with pytest.raises(ValueError, match=f"source 'web'.*{words}"):
        open_sources({"web": spec})


@pytest.mark.parametrize("sources", [{}, None, "data.jsonl", ["data.jsonl"]])
def test_sources_that_are_no_mapping(sources: object) -> None:
    with pytest.raises(ValueError, match=r"must be a mapping {name: path} with at least one source"):
        open_sources(sources)


def test_weights_for_some_sources_only(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"sources \['b'\] have no weight while others have"):
        open_sources({"a": {"path": folder / "a.jsonl", "weight": 2}, "b": folder / "b.txt"})


# -- a state of another run ---------------------------------------------------------------------------------------------


def test_other_documents_in_the_same_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\nand another\n" * 400)
    (tmp_path / "b.bin").write_bytes(bytes(range(200)) * 40)
    for path, before, after, words in (
        ("a.txt", {"split": "block"}, {"split": "line"}, "cut into documents by {'split': 'block'} when .* 'line'"),
        ("b.bin", {"eos_id": 514}, {"eos_id": 771}, "'eos_id': 514.* set it back, or add the files as another source"),
    ):
        options = {"seq_len": 8, "global_batch_size": 2, "tokenizer": Wide()}
        state = StreamLoader({"x": {"path": tmp_path / path, **before}}, **options).state_dict()
        with pytest.raises(ValueError, match=words):
            StreamLoader({"x": {"path": tmp_path / path, **after}}, **options, state=state)


def test_another_text_key_gives_up_what_was_begun(tmp_path: Path) -> None:
    record = {"text": "x" * 40, "title": "y" * 40}
    (tmp_path / "a.jsonl").write_text((json.dumps(record) + "\n") * 20)
    options = {"seq_len": 16, "global_batch_size": 2}
    loader = StreamLoader({"x": tmp_path}, **options)
    for _ in zip(range(4), loader, strict=False):
        pass
    again = StreamLoader({"x": {"path": tmp_path, "text_key": "title"}}, **options, state=loader.state_dict())
    assert again.skipped_documents == 2
    batch = next(iter(again))
    assert set(batch["input_ids"].unique().tolist()) <= {ord("y"), 256}
    assert StreamLoader({"x": tmp_path}, **options, state=loader.state_dict()).skipped_documents == 0


class Wide(ByteTokenizer):
    vocab_size = 1 << 16
