"""Token ids of texts from the ids of their words, which repeat.

A byte-level BPE cuts a text into words by a regular expression and tokenizes each by itself. Most words of a text have been seen
before, so their ids need not be computed but looked up: `re` and one dict do it three to five times as fast as the `tokenizers`
library, which also keeps where each piece came from.

The ids are the library's own. The expression is translated from the tokenizer's file for ASCII text, where Unicode's classes are
short lists; a new word's ids come from the library's model; around other characters and added tokens the library gets the
text, cut where tokens are cut anyway. Tokenizers that work in another way, and any whose ids differ on a probe, have no cache.
"""

import itertools
import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

WORDS = 1 << 17
"""Words that are kept: about 30 MB. When they are full, all are forgotten."""

_LONGEST = 64  # characters of a word that is kept: longer ones hardly repeat
_ASCII = [chr(code) for code in range(128)]
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DENSE = 32  # characters for each byte beyond one a character
_LEAVE_ASCII_ALONE = (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD)

# An escape, the bounds of a class, or an anchor. Anything else means the same in both dialects.
_PARTS = re.compile(r"\\p\{(?P<category>\w+)\}|\\(?P<escape>.)|(?P<bound>[\[\]])|(?P<anchor>[$^])", re.DOTALL)
_SAME_ESCAPES = frozenset("rntfvsSd.'\"|?*+()[]{}/-")
_CATEGORY = re.compile(r"[LMNPSZC][a-z]?")  # other properties are more than the first letters of a category
# Flags; classes with operators; `{1,3}+`, which is possessive here only, and its like; letters that are several without case.
_OTHER_MEANING = re.compile(
    r"\(\?(?!i:|:|!|=|<[!=]|>)|&&|\|\||~~|--|\{\d*,?\d*\}[+?*]|\{,|\(\?i:(?=[^)]*(?:[^\x00-\x7f]|\\p\{(?:Lu|Ll|Lt)))"
)


class WordCache:
    """The ids of a tokenizer's words.

    Args:
        tokenizer: As `word_expression` and a probe have found it fit, see `cache_for`.
        expression: What it cuts words with, of ASCII text.
        places: Where any text may be cut without changing its tokens; `None` if nowhere.
    """

    def __init__(self, tokenizer: Tokenizer, expression: re.Pattern[str], places: re.Pattern[str] | None) -> None:
        self._split, self._places, self._ids = expression.findall, places, _Ids(tokenizer)
        added, normalizer = list(tokenizer.get_added_tokens_decoder().values()), tokenizer.normalizer
        contents = {token.content for token in added}
        if normalizer is not None:  # the library looks for these tokens in normalized text: for `TM` where one is `™`
            contents |= {normalizer.normalize_str(token.content) for token in added if token.normalized}
        self._added = tuple({content[:2] for content in contents})  # few: they begin alike

    def encode(self, text: str, library: Callable[[Sequence[str]], Iterable[np.ndarray]]) -> np.ndarray | None:
        """Return the ids of a text (int32), or `None` if it is one for the library.

        Args:
            library: Returns the ids of each of several texts; called with the parts that are not plain ASCII.
        """
        if any(start in text for start in self._added):
            return None
        if text.isascii():
            return self._of_ascii(text)
        if self._places is None or _is_dense(text):
            return None
        parts = list(_parts(text, self._places))
        others = iter(library([part for part, plain in parts if not plain]))
        found = [ids for part, plain in parts if (ids := self._of_ascii(part) if plain else next(others)) is not None]
        return np.concatenate(found) if len(found) == len(parts) else None

    def _of_ascii(self, text: str) -> np.ndarray | None:
        words = self._split(text)
        if sum(map(len, words)) != len(text) or not all(words):  # something is left out, or cut at nothing
            return None
        return np.fromiter(itertools.chain.from_iterable(map(self._ids.__getitem__, words)), dtype=np.int32)


class _Ids(dict[str, tuple[int, ...]]):
    """Ids by word, computed by the tokenizer's model when they are first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._model = tokenizer.model
        self._as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str

    def __missing__(self, word: str) -> tuple[int, ...]:
        ((letters, _),) = self._as_bytes(word)
        ids = tuple(token.id for token in self._model.tokenize(letters))
        if len(word) <= _LONGEST:
            if len(self) >= WORDS:
                self.clear()
            self[word] = ids
        return ids


def _parts(text: str, places: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Cut a text into parts that are ASCII (`True`) and, as short as they can be, parts around what is not."""
    done = 0
    while found := _OTHER.search(text, done):
        begin = _last(places, text, done, found.start())
        end = place.end() if (place := places.search(text, found.end())) else len(text)
        if begin > done:
            yield text[done:begin], True
        yield text[begin:end], False
        done = end
    if done < len(text):
        yield text[done:], True


_OTHER = re.compile(r"[^\x00-\x7f]")


def _last(places: re.Pattern[str], text: str, start: int, end: int) -> int:
    """Return the last place between two positions, the first of them if there is none."""
    for near in (64, 4096, end):
        found = list(places.finditer(text, max(start, end - near), end))
        if found:
            return found[-1].end()
    return start


def _is_dense(text: str) -> bool:
    """Whether other than ASCII characters are so many that cutting around them costs more than it saves."""
    return _DENSE * (len(text.encode("utf-8", "surrogatepass")) - len(text)) > len(text)


def cache_for(tokenizer: Tokenizer, places: Sequence[str]) -> WordCache | None:
    """Return the cache of a tokenizer, or `None` where words have no ids of their own.

    Args:
        tokenizer: A tokenizer of the library.
        places: Expressions that match where any text may be cut without changing its tokens.
    """
    expression = word_expression(tokenizer)
    if expression is None:
        return None
    cache = WordCache(tokenizer, expression, re.compile("|".join(places)) if places else None)
    return cache if _agrees(cache, tokenizer) else None


def word_expression(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return what cuts ASCII text into words; `None` where a tokenizer works in another way."""
    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout or tokenizer.pre_tokenizer is None:
        return None
    if tokenizer.normalizer is not None and type(tokenizer.normalizer) not in _LEAVE_ASCII_ALONE:
        return None
    steps = json.loads(tokenizer.pre_tokenizer.__getstate__())
    *before, last = (steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]) or [{"type": None}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    expressions = [_split_of(step) for step in before] + ([_GPT_2] if last["use_regex"] else [])
    return None if len(expressions) != 1 or expressions[0] is None else translated(expressions[0])


def _split_of(step: dict) -> str | None:
    expression = (step.get("pattern") or {}).get("Regex")
    return expression if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] else None


def translated(expression: str) -> re.Pattern[str] | None:
    """Return an expression of the library's dialect (Oniguruma's) in `re`'s, for ASCII text; `None` if that is not certain."""
    classes = 0  # open ones
    if _OTHER_MEANING.search(expression):
        return None

    def part(found: re.Match[str]) -> str:
        nonlocal classes
        if category := found["category"]:
            if not _CATEGORY.fullmatch(category):
                raise re.error(f"{category} is no general category")
            members = "".join(re.escape(c) for c in _ASCII if unicodedata.category(c).startswith(category))
            return members if classes else f"[{members}]" if members else r"(?!)"
        if escape := found["escape"]:
            if escape not in _SAME_ESCAPES:
                raise re.error(f"\\{escape} is not known")
        elif anchor := found["anchor"]:
            if not (classes and anchor == "^"):
                raise re.error(f"{anchor} is not known")
        else:
            classes += 1 if found["bound"] == "[" else -1
            if classes not in (0, 1):
                raise re.error("a class within a class")
        return found[0]

    try:
        compiled = re.compile(_PARTS.sub(part, expression), re.ASCII)
    except re.error:
        return None
    return None if compiled.groups else compiled  # of groups `findall` would return the parts


def _agrees(cache: WordCache, tokenizer: Tokenizer) -> bool:
    """Whether cache and library give the same ids for short texts of all kinds of characters."""
    rng = random.Random(0)
    letters = ["".join(rng.choices("aBc'sS \n\t\r1_.\"-", k=12)) for _ in range(200)]
    letters += ["".join(rng.choices(_ASCII, k=20)) for _ in range(100)]
    letters += ["I'LL say: it's  12345 words\r\n\r\n  and\t\tmore.\n", "x = f(a_b, 1.5e-3)  # fine\n\n\n    return  "]

    def library(texts: Sequence[str]) -> list[np.ndarray]:
        found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    ours = [cache.encode(text, library) for text in letters]
    theirs = library(letters)
    return all(a is None or np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
