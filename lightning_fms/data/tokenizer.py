"""Text to tokens: built in the process that uses it, never before a fork.

A tokenizer is named, not passed around: the object here holds the name and builds the real thing on first use, so worker
processes start with nothing but a path. Its fingerprint goes into the state, so that a run that goes on with another
tokenizer knows.

The `tokenizers` library takes about 200 bytes a character while it works, 4 GB for a book-sized line of 20 MB. So a long text
goes to it in pieces, cut where the tokenizer cuts anyway (see `JsonTokenizer`); the ids are those of the whole.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tokenizers import Tokenizer as HfTokenizer

from lightning_fms.data.words import WordCache, cache_for

PIECE = 1 << 18
"""Characters of a piece of a long text: 50 MB while it is tokenized."""

_PLACES = (r"[A-Za-z](?= [A-Za-z])", r"\n(?=[^\W\d_])")
"""Where a text may be cut: behind a letter, before a space and a letter; between a newline and a letter."""

_BEFORE = (("ab", "I'm ab", "12 ab", "  ab", "é.ab", "AB", "a\n\nab"), ("ab\n", "ab \n", "1\n", ".\n", "a\n\n", "你\n"))
_BEHIND = ((" cd", " cd's", " cd 12", " Cd\n", " cd  ", " c"), ("cd", "Cd 1", "c", "你好", "é!", "cd\n"))

_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "[CLS]")


@runtime_checkable
class Tokenizer(Protocol):
    """What the loader needs of a tokenizer; any object with these works.

    vocab_size: ids are below it. eos_id, bos_id: special ids, or `None`. fingerprint: changes when the ids change.
    """

    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of a text, without special tokens (1-D integer array)."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of token ids."""
        ...


class ByteTokenizer:
    """A token a byte of UTF-8; 256 ends a document."""

    vocab_size = 257
    eos_id: int | None = 256
    bos_id: int | None = None
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text as ids."""
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8)

    def decode(self, ids: Any) -> str:
        """Return the text of ids; the end of a document shows as a blank line."""
        ids = np.asarray(ids).ravel()
        parts = np.split(ids, np.flatnonzero(ids == self.eos_id))
        return "\n\n".join(part[part < 256].astype(np.uint8).tobytes().decode(errors="replace") for part in parts)


class JsonTokenizer:
    """A `tokenizers` JSON file, or a Hugging Face folder with one.

    A text of more than `PIECE` characters is tokenized in pieces if the tokenizer's own first steps (normalizer and
    pre-tokenizer) cut between words or lines, which those of GPT, Llama 3, Qwen, BERT and T5 do; it is tried out. Where they do
    not (Llama 2 and others merge across spaces), or a text has neither words nor lines, it is tokenized as a whole: as exact,
    and with the library's appetite for memory.

    Args:
        path: `tokenizer.json`, or the folder that holds it (then `tokenizer_config.json` names the special tokens).

    Raises:
        ValueError: If there is no such file or it is no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"tokenizer={str(path)!r}: cannot be read ({error.strerror}); "
                "give 'bytes', a tokenizers JSON file, or a folder that holds tokenizer.json"
            ) from None
        names = _special_names(self.path.parent / "tokenizer_config.json") if path.is_dir() else {}
        self._built: HfTokenizer | None = None
        self._words: WordCache | None = None
        self._place: re.Pattern | None = None
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_id = self._special("eos_token", names, _EOS_NAMES)
        self.bos_id = self._special("bos_token", names, _BOS_NAMES)
        self.fingerprint = blake2b(data, digest_size=16).hexdigest()
        self._built = self._words = None  # the next user, perhaps a worker, builds its own

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, without special tokens."""
        if len(text) > PIECE:
            return np.concatenate([self._encode(piece) for piece in self._pieces(text)])
        return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        library = self._library  # first, for it makes the cache of words
        ids = self._words.encode(text, library) if self._words is not None else None
        return library([text])[0] if ids is None else ids

    @property
    def _library(self) -> Callable[[Sequence[str]], list[np.ndarray]]:
        tokenizer = self._tokenizer

        def encode(texts: Sequence[str]) -> list[np.ndarray]:
            # A batch even of one: only `encode_batch_fast` leaves out where each token stood in the text, a fifth of the time.
            try:
                found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            except TypeError:  # half a surrogate pair, which JSON can escape, is no Unicode text: U+FFFD stands for it
                whole = [t.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace") for t in texts]
                found = tokenizer.encode_batch_fast(whole, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

        return encode

    def _pieces(self, text: str) -> Iterator[str]:
        """Cut a long text where its tokens are cut, too."""
        if self._place is None:
            self._place = re.compile("|".join(_safe_places(self._tokenizer)) or r"(?!)")
        start = 0
        while found := self._place.search(text, start + PIECE):
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    def decode(self, ids: Any) -> str:
        """Return the text of ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in np.asarray(ids).ravel()], skip_special_tokens=False)

    @property
    def _tokenizer(self) -> HfTokenizer:
        if self._built is None:
            try:
                built = HfTokenizer.from_file(str(self.path))
            except Exception as error:  # the library raises bare Exception
                raise ValueError(f"tokenizer={str(self.path)!r}: not a tokenizers JSON file ({error})") from None
            built.no_truncation()  # many files cut at the length of the model they were made for
            built.no_padding()
            self._built, self._words = built, cache_for(built, _safe_places(built))
        return self._built

    def _special(self, role: str, names: dict[str, str], usual: tuple[str, ...]) -> int | None:
        for name in [names[role]] if role in names else usual:
            if (found := self._tokenizer.token_to_id(name)) is not None:
                return found
        return None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_built": None, "_words": None, "_place": None}


def _safe_places(tokenizer: HfTokenizer) -> list[str]:
    """Return those of `_PLACES` at which the two parts of a text make the tokens of the whole.

    Models tokenize what the pre-tokenizer cuts word by word, so it is enough that normalizer and pre-tokenizer do the same to
    the parts as to the whole, and that no added token reaches across.
    """
    normalizer, words = tokenizer.normalizer, tokenizer.pre_tokenizer
    across = any(
        token.rstrip or re.search(r"\s", token.content) for token in tokenizer.get_added_tokens_decoder().values()
    )
    if words is None or across:
        return []

    def cut(text: str) -> list[str]:
        text = normalizer.normalize_str(text) if normalizer is not None else text
        return [word for word, _ in words.pre_tokenize_str(text)]

    return [
        place
        for place, before, behind in zip(_PLACES, _BEFORE, _BEHIND, strict=True)
        if all(cut(left + right) == cut(left) + cut(right) for left in before for right in behind)
    ]


def _special_names(config: Path) -> dict[str, str]:
    if not config.is_file():
        return {}
    try:
        settings = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{config}: holds a {type(settings).__name__}, not the settings of a tokenizer")
    names = {}
    for role in ("eos_token", "bos_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[role] = token
    return names


def open_tokenizer(tokenizer: Any) -> Tokenizer:
    """Return the tokenizer that a `tokenizer` argument stands for.

    Args:
        tokenizer: `"bytes"`, a path (see `JsonTokenizer`), or an object with the methods of `Tokenizer`.

    Raises:
        ValueError: If it is none of these.
    """
    if tokenizer == "bytes":
        return ByteTokenizer()
    if isinstance(tokenizer, (str, Path)):
        return JsonTokenizer(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    raise ValueError(
        f"tokenizer={tokenizer!r} must be 'bytes', a path to a tokenizers JSON file or folder, or an object with "
        "encode, decode, vocab_size, eos_id, bos_id and fingerprint"
    )
