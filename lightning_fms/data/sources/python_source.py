"""Real text that every Python carries: its standard library, as prose or as code.

Nothing is built or copied: a file is listed by name and size, and parsed when a stream first comes to it. Prose is the
docstrings and the help topics (`pydoc_data.topics`), code is the source files themselves.
"""

import ast
import os
import re
import sysconfig
import tokenize
import warnings
from collections import OrderedDict
from importlib.util import find_spec
from inspect import cleandoc
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_fms.data.sources.listing import Listing, list_files
from lightning_fms.data.sources.source import Document, DocumentError, Window

_SHORTEST_PROSE = 120  # characters; shorter docstrings are mostly signatures
_PARSED = 4096  # many streams read many files in turn
_NEWLINE = re.compile(rb"\r\n?|\n")  # what ends a line for Python's parser
_SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__")


class PythonSource:
    """Documents from a tree of Python files.

    Args:
        kind: `"docstrings"`: every docstring of 120 characters or more, and every help topic, is a document.
            `"code"`: every file is a document.
        root: Folder of `.py` files; default: the standard library of the running Python, without its tests.
        package: Name of an installed package to take instead of a folder.

    Raises:
        ValueError: For another kind, a package that is not installed, or a folder without Python files.
    """

    listing: Listing

    def __init__(
        self, kind: Literal["docstrings", "code"], root: str | Path | None = None, package: str | None = None
    ) -> None:
        if kind not in ("docstrings", "code"):
            raise ValueError(f"kind={kind!r} must be 'docstrings' or 'code'")
        self.kind = kind
        self.cut = {"kind": kind}
        if root is not None and package is not None:
            raise ValueError(f"root={str(root)!r} and package={package!r} are two places; give one")
        folder = _package_folder(package) if package else Path(root or sysconfig.get_path("stdlib"))
        files = _python_files(folder)
        if not files:
            raise ValueError(f"{folder}: holds no .py file; set root to a folder with Python sources")
        listing = list_files(files)
        self.listing = Listing(listing.root, listing.names, listing.sizes, splittable=False)
        self._parsed: OrderedDict[int, dict[int, tuple[int, str]]] = OrderedDict()

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents that start in bytes `[start, stop)` of a file."""
        found = {at: size for at, (size, _) in self._documents(file).items() if start <= at < stop}
        starts = sorted(found)
        return Window(
            np.array([at - start for at in starts], dtype=np.uint32),
            np.array([found[at] for at in starts], dtype=np.uint32),
        )

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the document that starts at byte `start`."""
        try:
            return self._documents(file)[start][1]
        except KeyError:
            raise DocumentError(f"{self.listing.path(file)}: no document starts at byte {start} any more") from None

    def _documents(self, file: int) -> dict[int, tuple[int, str]]:
        if file in self._parsed:
            self._parsed.move_to_end(file)
            return self._parsed[file]
        path = self.listing.path(file)
        try:
            data = Path(path).read_bytes()
            encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
            text = data.decode(encoding)
            documents = {0: (len(data), text)} if self.kind == "code" else _prose(data)
        except (OSError, SyntaxError, ValueError) as error:
            raise DocumentError(f"{path}: cannot be read as Python ({error})") from None
        self._parsed[file] = documents
        while len(self._parsed) > _PARSED:
            self._parsed.popitem(last=False)
        return documents


def _package_folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"package={package!r} is not an installed package; name one, or give root")
    return Path(next(iter(found.submodule_search_locations)))


def _python_files(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    return files


def _prose(data: bytes) -> dict[int, tuple[int, str]]:
    """Return the docstrings and dictionary texts of a file: first byte -> (bytes, text)."""
    line_starts = [0, *(newline.end() for newline in _NEWLINE.finditer(data))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's invalid escape sequences
        tree = ast.parse(data)
    documents = {}
    for node in _strings(tree):
        start = line_starts[node.lineno - 1] + node.col_offset
        stop = line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        text = cleandoc(str(node.value))
        if len(text) >= _SHORTEST_PROSE:
            documents[start] = (stop - start, text)
    return documents


def _strings(tree: ast.Module) -> list[ast.Constant]:
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            found += [node.body[0].value] if isinstance(node.body[0], ast.Expr) else []
        elif isinstance(node, ast.Dict):
            found += node.values
    return [node for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]
