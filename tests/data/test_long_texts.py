"""A long text is tokenized in pieces, and its ids are those of the whole; a line of 20 MB loses nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from lightning_fms.data import StreamLoader, tokenizer
from lightning_fms.data.tokenizer import JsonTokenizer

LLAMA_3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = "the ab cab, it's 12 345 \n\nbad  dad's\n 你好 é! a b c d abc cd"


def byte_level(**options: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def metaspace(**options: object) -> pre_tokenizers.Metaspace:
    return pre_tokenizers.Metaspace(**options)  # type: ignore[arg-type]


LIKE = {
    "gpt-2": (None, byte_level()),
    "roberta": (None, byte_level(add_prefix_space=True)),
    "llama 3": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Split(LLAMA_3, "isolated"), byte_level(use_regex=False)]),
    ),
    "mistral": (None, metaspace(prepend_scheme="first")),
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()),
    "t5": (normalizers.NFKC(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace()])),
    "llama 2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "gemma": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
}
WHOLE = ("llama 2", "gemma")
"""They merge across spaces and lines."""


def build(name: str) -> HfTokenizer:
    normalizer, words = LIKE[name]
    built = HfTokenizer(models.Unigram() if name == "t5" else models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        built.normalizer = normalizer
    if words is not None:
        built.pre_tokenizer = words
    options = {"vocab_size": 400, "special_tokens": ["<unk>", "</s>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if name == "t5":
        trainer: object = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    built.train_from_iterator([SAMPLE] * 5, trainer)
    return built


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    for name in LIKE:
        build(name).save(str(root / f"{name}.json"))
    return {name: root / f"{name}.json" for name in LIKE}


words = st.one_of(
    st.sampled_from(
        [" ", "\n", "  ", " \n", "\n\n", "\r\n", "\t", ", ", "'s ", "1", "12 ", "你好", "é", "。", "</s>", "\u2028"]
    ),
    st.text("abcd", min_size=1, max_size=4),
    st.sampled_from([" ab", " cd", " the", "bad ", " a b c", "\nab", "\n你"]),
)


@pytest.mark.parametrize("name", LIKE)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.lists(words, max_size=40).map("".join), piece=st.integers(1, 12))
def test_the_ids_of_the_pieces_are_those_of_the_whole(saved: dict[str, Path], name: str, text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE", piece)
        ours = JsonTokenizer(saved[name])
        whole = HfTokenizer.from_file(str(saved[name])).encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == whole
        assert "".join(ours._pieces(text)) == text


@pytest.mark.parametrize("name", LIKE)
def test_pieces_are_about_as_long_as_they_should_be(
    saved: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    pieces = list(JsonTokenizer(saved[name])._pieces("some words of a text " * 1000))
    assert max(map(len, pieces)) <= 1020 if name not in WHOLE else len(pieces) == 1


@pytest.mark.parametrize("token", [AddedToken("two words"), AddedToken("<mask>", rstrip=True)])
def test_a_token_that_reaches_over_a_space_keeps_texts_whole(tmp_path: Path, token: AddedToken) -> None:
    built = build("gpt-2")
    built.add_tokens([token])
    built.save(str(tmp_path / "a.json"))
    assert len(list(JsonTokenizer(tmp_path / "a.json")._pieces("two words " * 100_000))) == 1


def test_a_line_of_20_mb_loses_no_token(tmp_path: Path) -> None:
    line = np.random.default_rng(0).integers(97, 123, 20_000_000, dtype=np.uint8).tobytes()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "short"}\n{"text": "' + line + b'"}\n' + b'{"text": "after"}\n' * 3)
    loader = StreamLoader({"a": tmp_path}, 1 << 16, 4, one_pass=True)
    for batch in loader:
        if not batch["row_valid"].any():
            break
    assert sum(entry["tokens"] for entry in loader.mix_report().values()) == 20_000_001 + 6 + 3 * 6


def test_a_long_text_with_words_has_the_ids_of_the_whole(saved: dict[str, Path]) -> None:
    """Two pieces and a half, as they are cut in earnest."""
    rng = np.random.default_rng(0)
    text = json.dumps(
        [f"{SAMPLE[i:j]}" for i, j in rng.integers(0, len(SAMPLE), (30_000, 2)).tolist()], ensure_ascii=False
    )
    text = (text * 3)[: 5 * tokenizer.PIECE // 2]
    ours = JsonTokenizer(saved["llama 3"])
    assert len(list(ours._pieces(text))) == 3
    whole = HfTokenizer.from_file(str(saved["llama 3"])).encode(text, add_special_tokens=False).ids
    assert np.array_equal(ours.encode(text), whole)
