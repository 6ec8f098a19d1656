"""Bare files of token ids (`.bin`), as nanoGPT, llm.c and modded-nanogpt write them.

nanoGPT's file is the ids and nothing else. llm.c and modded-nanogpt put 1,024 bytes before them: 256 int32, of which the
first three are a magic number, a version and the number of tokens. Such a header is recognised by itself.

Neither form says where a document ends. A special token does, if the file has one and its id is named here. Without it the
file is cut into blocks of 64 Ki tokens: nothing is lost between them, but what follows a cut does not see what came before.
"""

import numpy as np

from lightning_fms.data.sources.files import FileReader
from lightning_fms.data.sources.listing import Listing, Paths, list_files
from lightning_fms.data.sources.megatron import MegatronTokens, check_some, index_name
from lightning_fms.data.sources.source import Document, DocumentError, Source, Window

BLOCK_TOKENS = 64 << 10
"""Tokens of a document where no special token says where documents end."""

HEADER_BYTES = 1024
_HEADERS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # magic -> version, dtype of the tokens
_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_LOOK_AHEAD = 1 << 16


class TokenFiles:
    """Files of token ids; a document is a block, or what a special token marks.

    Args:
        paths: File, folder, glob or list of them, or their listing.
        dtype: Type of the ids, little-endian; `None` is uint16, or what a header says.
        eos_id: Id that ends a document and is a part of it.
        bos_id: Id that begins a document and is a part of it (llm.c and modded-nanogpt put `<|endoftext|>` first).

    Raises:
        ValueError: If an option is impossible, or none of the first files fits it.
    """

    listing: Listing
    holds_tokens = True

    def __init__(
        self, paths: Paths | Listing, dtype: str | None = None, eos_id: int | None = None, bos_id: int | None = None
    ) -> None:
        if dtype is not None and str(dtype) not in _DTYPES:
            raise ValueError(f"dtype={dtype!r} must be one of {', '.join(_DTYPES)}")
        if eos_id is not None and bos_id is not None:
            raise ValueError(f"eos_id={eos_id} and bos_id={bos_id}: a document is cut at one of them; give one")
        self._dtype, self._eos_id, self._bos_id = dtype, eos_id, bos_id
        self.cut = {"dtype": dtype, "eos_id": eos_id, "bos_id": bos_id}
        self.listing = paths if isinstance(paths, Listing) else list_files(paths)
        self._files = FileReader(self.listing)
        self._forms: dict[int, tuple[int, np.dtype]] = {}
        filled = np.flatnonzero(self.listing.sizes)
        check_some(len(filled), lambda place: self._form(int(filled[place])))

    def window(self, file: int, start: int, stop: int) -> Window:
        """Find the documents that start in bytes `[start, stop)`."""
        base, dtype = self._form(file)
        width, size = dtype.itemsize, int(self.listing.sizes[file])
        first, end = -(-max(start - base, 0) // width), -(-(stop - base) // width)  # tokens that start in the range
        if end <= first:
            return Window(np.empty(0, np.uint32), np.empty(0, np.uint32))
        edges = self._edges(file, first, end, (size - base) // width)
        lengths = np.diff(edges) * width
        if lengths.size and lengths.max() >= 1 << 32:
            at = base + int(edges[lengths.argmax()]) * width
            raise DocumentError(f"{self.listing.path(file)}: the document at byte {at} is longer than 4 GiB; split it")
        return Window((base - start + edges[:-1] * width).astype(np.uint32), lengths.astype(np.uint32))

    def read(self, file: int, start: int, length: int) -> Document:
        """Read the tokens of the document that starts at byte `start`."""
        return np.frombuffer(self._files.read(file, start, length), dtype=self._form(file)[1])

    def _edges(self, file: int, first: int, end: int, tokens: int) -> np.ndarray:
        """Return the documents' first tokens in `[first, end)`, and where the last of them ends (int64)."""
        if self._eos_id is None and self._bos_id is None:
            starts = np.arange(-(-first // BLOCK_TOKENS) * BLOCK_TOKENS, end, BLOCK_TOKENS)
            return np.append(starts, min(starts[-1] + BLOCK_TOKENS, tokens)) if len(starts) else starts
        starts = self._marks(file, first, end)
        if first == 0 and (len(starts) == 0 or starts[0] > 0):
            starts = np.concatenate(([0], starts))
        if len(starts) == 0:
            return starts
        while end < tokens:  # where the last document ends
            ahead = min(end + _LOOK_AHEAD, tokens)
            if len(found := self._marks(file, end, ahead)):
                return np.append(starts, found[0])
            end = ahead
        return np.append(starts, tokens)

    def _marks(self, file: int, first: int, end: int) -> np.ndarray:
        """Return the tokens of `[first, end)` that a special token makes the first of a document."""
        before = (
            1 if self._bos_id is None and first else 0
        )  # the token before tells whether a document starts at `first`
        base, dtype = self._form(file)
        data = self._files.read(file, base + (first - before) * dtype.itemsize, (end - first + before) * dtype.itemsize)
        ids = np.frombuffer(data, dtype=dtype)
        if self._bos_id is not None:
            return first + np.flatnonzero(ids == self._bos_id)
        starts = first - before + 1 + np.flatnonzero(ids == self._eos_id)
        return starts[starts < end]

    def _form(self, file: int) -> tuple[int, np.dtype]:
        """Return the first byte of a file's tokens, and their type."""
        if file not in self._forms:
            self._forms[file] = self._find_form(file)
        return self._forms[file]

    def _find_form(self, file: int) -> tuple[int, np.dtype]:
        path, size = self.listing.path(file), int(self.listing.sizes[file])
        head = np.frombuffer(self._files.read(file, 0, 12), dtype="<i4").tolist() if size >= HEADER_BYTES else [0]
        base, dtype = 0, np.dtype(self._dtype or "uint16").newbyteorder("<")
        if head[0] in _HEADERS:
            version, name = _HEADERS[head[0]]
            base, dtype = HEADER_BYTES, np.dtype(name).newbyteorder("<")
            if head[1] != version or self._dtype not in (None, name):
                raise DocumentError(
                    f"{path}: its header has magic number {head[0]} and version {head[1]}; known is version {version}, with "
                    f"{name} tokens (dtype={self._dtype})"
                )
            if size != base + head[2] * dtype.itemsize:
                raise DocumentError(
                    f"{path}: its header counts {head[2]:,} tokens, {base + head[2] * dtype.itemsize:,} bytes, and it has "
                    f"{size:,}; write it again"
                )
        if (size - base) % dtype.itemsize:
            raise DocumentError(
                f"{path}: has {size:,} bytes, no whole number of {dtype.name} tokens; set dtype, or restore it"
            )
        return base, dtype


def open_token_files(listing: Listing, **options: object) -> Source:
    """Open `.bin` files: Megatron's where `.idx` files lie beside them, else bare tokens.

    Args:
        listing: The `.bin` files, and perhaps `.idx` files.
        options: Those of `TokenFiles`.

    Raises:
        ValueError: If only some of the files have an index, or an option does not belong to what was found.
    """
    bins = [name for name in listing.names if not name.endswith(".idx")]
    if lonely := sorted({n for n in listing.names if n.endswith(".idx")} - {index_name(name) for name in bins}):
        raise ValueError(
            f"{listing.root / lonely[0]}: its .bin file is not among the files; name both, or the .bin file"
        )
    indexes = set(listing.existing(map(index_name, bins)).names)
    indexed = [name for name in bins if index_name(name) in indexes]
    if not indexed:
        return TokenFiles(listing, **options)  # type: ignore[arg-type]
    if len(indexed) < len(bins):
        bare = min(set(bins) - set(indexed))
        raise ValueError(
            f"{listing.root / bare}: has no .idx file, and {indexed[0]} has; a source is of one form, so name the files by a "
            "glob, or restore the index"
        )
    for name, value in options.items():
        raise ValueError(
            f"{name}={value!r} does not apply to Megatron's .bin and .idx, which say it themselves; remove it"
        )
    return MegatronTokens(listing)
