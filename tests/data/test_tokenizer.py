"""Tokenizers: exact ids, special tokens by name, one clear error, and nothing built before a fork."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from lightning_fms.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind it at all"


def train(path: Path, special: list[str], vocabulary: int = 300) -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    train(tmp_path / "tokenizer.json", ["<|endoftext|>", "<s>", "<|custom|>"])
    return tmp_path / "tokenizer.json"


# -- bytes ----------------------------------------------------------------------------------------------------------------

characters = st.one_of(st.characters(codec="utf-8"), st.sampled_from("\0\n\r\u2028😀"))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(characters, max_size=30).map("".join))
def test_bytes_are_ids(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_end_of_a_document_is_256() -> None:
    tokenizer = open_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
    assert tokenizer.decode([104, 105, 256, 104, 111]) == "hi\n\nho"
    assert tokenizer.encode("half \ud83d pair").max() < 256


# -- files ----------------------------------------------------------------------------------------------------------------


def test_a_json_file_gives_the_library_s_ids(saved: Path) -> None:
    theirs, ours = HfTokenizer.from_file(str(saved)), open_tokenizer(str(saved))
    assert isinstance(ours, Tokenizer)
    assert ours.vocab_size == theirs.get_vocab_size() == 300
    assert ours.eos_id == theirs.token_to_id("<|endoftext|>")
    assert ours.bos_id == theirs.token_to_id("<s>")
    for text in (TEXT, "", "ü € 😀\u2028\x00", TEXT * 100):
        ids = ours.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text
    assert ours.decode([ours.eos_id]) == "<|endoftext|>"


def test_half_a_surrogate_pair_becomes_a_replacement_character(saved: Path) -> None:
    tokenizer = JsonTokenizer(saved)
    assert tokenizer.decode(tokenizer.encode("half \ud83d pair")) == "half \ufffd pair"


@pytest.mark.parametrize(
    "token", ["<|custom|>", {"content": "<|custom|>", "lstrip": False}], ids=["as a string", "as an object"]
)
def test_a_hugging_face_folder_names_its_special_tokens(saved: Path, token: object) -> None:
    (saved.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": token, "bos_token": None}))
    tokenizer = open_tokenizer(saved.parent)
    assert tokenizer.eos_id == HfTokenizer.from_file(str(saved)).token_to_id("<|custom|>")
    assert tokenizer.bos_id == HfTokenizer.from_file(str(saved)).token_to_id("<s>")
    assert open_tokenizer(saved).eos_id != tokenizer.eos_id  # the file alone goes by the usual names


def test_a_folder_without_a_config_goes_by_the_usual_names(saved: Path) -> None:
    assert open_tokenizer(saved.parent).eos_id == open_tokenizer(saved).eos_id


def test_a_tokenizer_without_special_tokens(tmp_path: Path) -> None:
    train(tmp_path / "plain.json", [])
    tokenizer = open_tokenizer(tmp_path / "plain.json")
    assert (tokenizer.eos_id, tokenizer.bos_id) == (None, None)


def test_the_fingerprint_follows_the_content(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(saved.read_bytes())
    train(tmp_path / "other.json", ["<|endoftext|>"], vocabulary=290)
    prints = [open_tokenizer(path).fingerprint for path in (saved, copy, tmp_path / "other.json")]
    assert prints[0] == prints[1] != prints[2]
    assert "bytes" not in prints


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("{}"), "not a tokenizers JSON file"),
        (lambda path: path.write_bytes(os.urandom(100)), "not a tokenizers JSON file"),
        (lambda path: path.write_text(""), "not a tokenizers JSON file"),
        (lambda path: path.mkdir(), r"cannot be read \(No such file or directory\); give 'bytes'"),
        (lambda path: None, r"cannot be read \(No such file or directory\); give 'bytes'"),
    ],
    ids=["other JSON", "random bytes", "empty", "empty folder", "missing"],
)
def test_a_file_that_is_no_tokenizer_is_one_clear_error(tmp_path: Path, make: Callable, words: str) -> None:
    make(path := tmp_path / "it.json")
    with pytest.raises(ValueError, match=f"tokenizer='{path}.*{words}") as error:
        open_tokenizer(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "words"), [("{", "not valid JSON"), ("[]", "holds a list, not the settings")])
def test_a_broken_config_is_named(saved: Path, content: str, words: str) -> None:
    config = saved.parent / "tokenizer_config.json"
    config.write_text(content)
    with pytest.raises(ValueError, match=f"{config}: {words}"):
        open_tokenizer(saved.parent)


@pytest.mark.parametrize("what", [None, 3, object(), ["bytes"]])
def test_other_things_are_refused(what: object) -> None:
    with pytest.raises(
        ValueError, match="must be 'bytes', a path to a tokenizers JSON file or folder, or an object with"
    ):
        open_tokenizer(what)


def test_any_object_with_the_methods_will_do() -> None:
    class Digits:
        vocab_size, eos_id, bos_id, fingerprint = 11, 10, None, "digits"

        def encode(self, text: str) -> np.ndarray:
            return np.array([int(c) for c in text if c.isdigit()])

        def decode(self, ids: object) -> str:
            return "".join(map(str, np.asarray(ids)))

    digits = Digits()
    assert open_tokenizer(digits) is digits


# -- processes --------------------------------------------------------------------------------------------------------------


def test_a_pickle_carries_the_name_and_not_the_tokenizer(saved: Path) -> None:
    tokenizer = JsonTokenizer(saved)
    ids = tokenizer.encode(TEXT)
    data = pickle.dumps(tokenizer)
    assert len(data) < 1000
    saved.rename(saved.with_name("away"))
    copy = pickle.loads(data)  # builds nothing yet
    assert (copy.vocab_size, copy.eos_id, copy.fingerprint) == (300, tokenizer.eos_id, tokenizer.fingerprint)
    saved.with_name("away").rename(saved)
    assert copy.encode(TEXT).tolist() == ids.tolist()


PROGRAM = """
import sys
from lightning_fms.data import StreamLoader
if __name__ == "__main__":
    data, tokenizer = sys.argv[1:]
    loader = StreamLoader({"a": data}, 16, 4, tokenizer=tokenizer, num_workers=2, multiprocessing_context="fork")
    loader.tokenizer.encode("used in the parent before the fork")
    batches = iter(loader)
    first = [next(batches)["input_ids"].tolist() for _ in range(5)]
    loader.close()
    again = iter(StreamLoader({"a": data}, 16, 4, tokenizer=tokenizer))
    assert first == [next(again)["input_ids"].tolist() for _ in range(5)]
"""


def test_forked_workers_tokenize_without_a_word(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(50)))
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "program.py", tmp_path / "data.jsonl", saved],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_truncation_and_padding_of_the_file_do_not_cut_or_fill_documents(tmp_path: Path) -> None:
    tokenizer = train(tmp_path / "tokenizer.json", ["<|endoftext|>"])
    whole = tokenizer.encode(TEXT).ids
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.encode(TEXT).tolist() == whole
    assert len(ours.encode("the")) < 8
