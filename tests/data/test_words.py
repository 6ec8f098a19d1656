"""Ids looked up word by word are the library's, for every kind of text; tokenizers that work in another way are left to it."""

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from lightning_fms.data import words
from lightning_fms.data.tokenizer import JsonTokenizer

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = "the ab cab, it's 12 345 \n\nbad  dad's\n 你好 é! a b c d abc cd Is IT'S a_b == 1.5;\n    return x\r\n"


def byte_level(**options: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def split(expression: str, behavior: str = "isolated") -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), behavior), byte_level(use_regex=False)]  # type: ignore[arg-type]
    )


CACHED = {
    "gpt-2": byte_level(),
    "llama 3": split(LLAMA_3),
    "qwen": split(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")),
    "gpt-4o": split(GPT_4O),
    "leaves gaps": split(r"\p{L}+|\s+"),
    "may match nothing": split(r"\p{L}*|\s+"),
}
NOT_CACHED = {
    "prefix space": byte_level(add_prefix_space=True),
    "removed": split(r"\s+", "removed"),
    "two steps": pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_level()]),
    "another expression": split(r"^\w+|\s+"),
    "a class in a class": split(r"[[:alpha:]]+|\s+"),
    "a class cut with another": split(r"[\S&&\p{L}]+|\s+"),
    "another property": split(r"\p{Alphabetic}+|\s+"),
    "flags of another dialect": split(r"(?m:.)+"),
    "a repeated repetition": split(r"\p{N}{1,3}+|\p{L}+|\s+"),
    "a lazy repetition": split(r"a{2}?b|\p{L}+|\s+"),
    "letters that are two without case": split(r"(?i:ß)|\p{L}+|\s+"),
    "groups": split(r"(\p{L})(\p{L}*)|\s+"),
    "an operator in a class": split(r"[a||b]+|\s+"),
    "no steps": pre_tokenizers.Sequence([]),
    "metaspace": pre_tokenizers.Metaspace(),
    "none": None,
}


def build(pre_tokenizer: object) -> HfTokenizer:
    built = HfTokenizer(models.BPE(unk_token="<unk>"))
    if pre_tokenizer is not None:
        built.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=400,
        special_tokens=["<unk>", "<|end|>"],
        show_progress=False,
    )
    built.train_from_iterator([SAMPLE] * 5, trainer)
    return built


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    for name, step in {**CACHED, **NOT_CACHED}.items():
        build(step).save(str(root / f"{name}.json"))
    return {name: root / f"{name}.json" for name in {**CACHED, **NOT_CACHED}}


@pytest.fixture(scope="module")
def opened(saved: dict[str, Path]) -> dict[str, tuple[JsonTokenizer, HfTokenizer]]:
    return {name: (JsonTokenizer(path), HfTokenizer.from_file(str(path))) for name, path in saved.items()}


pieces = st.one_of(
    st.sampled_from(
        [" ", "\n", "  ", " \n", "\r\n", "\t", ", ", "'s ", "'LL", "1", "12345 ", "你好", "é", "“", "\u2028", "\xa0"]
    ),
    st.sampled_from([" ab", " the cab ", "a b c ab", "\nab", "\n你", "<|end|>", "<|", "\x1c", "\x00", "\ud83d", "😀"]),
    st.text(st.characters(max_codepoint=127), max_size=5),
    st.text(max_size=3),
)


@pytest.mark.parametrize("name", CACHED)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(parts=st.lists(pieces, max_size=30), plain=st.integers(0, 3))
def test_ids_are_the_library_s(
    opened: dict[str, tuple[JsonTokenizer, HfTokenizer]], name: str, parts: list[str], plain: int
) -> None:
    around = "some words of a text\n" * 8 * plain  # so that rare other characters are cut around
    text = around + "".join(parts) + around
    ours, theirs = opened[name]
    unicode = text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")
    for _ in range(2):  # computed, and looked up
        assert ours.encode(text).tolist() == theirs.encode(unicode, add_special_tokens=False).ids
    assert ours.encode(text).dtype == np.int32


@pytest.mark.parametrize("name", {**CACHED, **NOT_CACHED})
def test_only_tokenizers_that_cut_into_words_have_a_cache(saved: dict[str, Path], name: str) -> None:
    ours = JsonTokenizer(saved[name])
    ours.encode("a")
    assert (ours._words is not None) == (name in CACHED)


def test_what_chance_or_a_normalizer_decides_is_the_library_s() -> None:
    by_chance, lowered = build(byte_level()), build(byte_level())
    by_chance.model.dropout = 0.5
    lowered.normalizer = normalizers.Lowercase()
    assert words.word_expression(build(byte_level())) is not None
    assert words.word_expression(by_chance) is None
    assert words.word_expression(lowered) is None


def test_a_normalizer_of_unicode_leaves_the_cache(saved: dict[str, Path], tmp_path: Path) -> None:
    built = HfTokenizer.from_file(str(saved["llama 3"]))
    built.normalizer = normalizers.NFC()
    built.save(str(tmp_path / "a.json"))
    ours = JsonTokenizer(tmp_path / "a.json")
    text = "some words of a text\n" * 20 + "cafe\u0301 and\nab"
    assert ours.encode(text).tolist() == built.encode(text, add_special_tokens=False).ids
    assert ours._words is not None


def test_a_text_that_holds_an_added_token_is_the_library_s(saved: dict[str, Path], tmp_path: Path) -> None:
    built = HfTokenizer.from_file(str(saved["gpt-2"]))
    built.add_tokens([AddedToken("the cab", single_word=True)])
    built.save(str(tmp_path / "a.json"))
    ours = JsonTokenizer(tmp_path / "a.json")
    for text in ("in the cab now", "in the cabs now", "x<|end|>y", "a < b"):
        assert ours.encode(text).tolist() == built.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("normalizer", "content", "texts"),
    [
        (normalizers.NFKC(), "\u2122", ["the TM ab", "the \u2122 ab"]),
        (normalizers.NFKC(), "\u2026", ["ab ... cab"]),
        (normalizers.NFC(), "\u212aab", ["ab Kab cab"]),
    ],
)
def test_an_added_token_is_found_in_normalized_text(
    tmp_path: Path, normalizer: normalizers.Normalizer, content: str, texts: list[str]
) -> None:
    built = build(byte_level())
    built.normalizer = normalizer
    built.add_tokens([AddedToken(content, normalized=True)])
    built.save(str(tmp_path / "a.json"))
    ours = JsonTokenizer(tmp_path / "a.json")
    for text in texts:
        assert ours.encode(text).tolist() == built.encode(text, add_special_tokens=False).ids
    assert ours._words is not None


def test_plain_text_never_reaches_the_library(saved: dict[str, Path]) -> None:
    built = HfTokenizer.from_file(str(saved["llama 3"]))
    cache, asked = words.cache_for(built, [r"[A-Za-z](?= [A-Za-z])"]), []
    assert cache is not None

    def library(texts: Sequence[str]) -> list[np.ndarray]:
        asked.extend(texts)
        return [np.array(built.encode(text).ids) for text in texts]

    text = "plain words, 12 of them\n" * 20 + "and one “quoted” word or two\n" + "plain words\n" * 20
    ids = cache.encode(text, library)
    assert ids is not None
    assert ids.tolist() == built.encode(text).ids
    assert asked == [" one “quoted” word"]
    assert cache.encode("“é”" * 100, library) is None  # too many to cut around
    assert len(asked) == 1


def test_few_words_are_kept(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "WORDS", 10)
    ours, theirs = JsonTokenizer(saved["gpt-2"]), HfTokenizer.from_file(str(saved["gpt-2"]))
    for text in (" ".join(map(str, range(100))), "a" * 1000):
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert ours._words is not None
        assert len(ours._words._ids) <= 10
    assert "a" * 1000 not in ours._words._ids


def test_a_copy_for_another_process_holds_no_words(saved: dict[str, Path]) -> None:
    ours = JsonTokenizer(saved["gpt-2"])
    ours.encode(SAMPLE)
    assert len(pickle.dumps(ours)) < 2000
