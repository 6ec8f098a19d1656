"""A refused override says what to type instead."""

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException

from lightning_fms.override_hints import explain
from lightning_fms.train import explained


@pytest.mark.parametrize(
    ("message", "overrides", "words"),
    [
        ("Could not override 'data.seqlen'.", ["data.seqlen=3"], "data.seqlen=3: no such key; did you mean data.seq_len?"),
        ("Could not override 'trainer.max_stps'.", ["experiment=quickstart"], "did you mean trainer.max_steps?"),
        ("Could not override 'data.sources'.", ["experiment=quickstart"], "data=text 'data.sources={name: /path"),
        ("Could not override 'data.sources.code'.", ["data.sources.code={path: a}"], "code={path: a}: this data config has"),
        ("Could not override 'zzzz'.", [], "+zzzz=<value> would add it"),
        ("mismatched input '='", ["resume=runs/step=6.ckpt"], "quotes around it: \"resume='runs/step=6.ckpt'\""),
        ("Could not override 'data.seqlen'.", ["resume=auto", "data=text"], "did you mean data.seq_len?"),
        ("Could not override 'trainer.limit_train_batches'.", [], "+trainer.limit_train_batches=<value> sets it"),
        ("Could not override 'trainer.precision'.", [], "give precision=<option>"),
        ("Could not override 'data.mixture'.", ["data.mixture={prose: 1, kode: 1}"],
         "data.mixture={prose: 1, kode: 1}: no source 'kode'; sources are code, prose"),
        ("Could not override 'data.mixture.kode'.", ["data.mixture.kode=1"], "data.mixture.kode=1: no source 'kode'; sources"),
        ("mismatched input", ["data=text", "++data.sources.mine=[unclosed"], "data.sources.mine=[unclosed: a bracket is not"),
        ("something else", ["a=b"], "something else"),
        ("missing EQUAL", ["data.sources={web: a"], "data.sources={web: a: a bracket is not closed"),
        ("Error parsing override 'b.jsonl' missing EQUAL at", [], "put quotes around it, 'data.sources.mine=/corpus/*.jsonl'"),
        ("Error parsing override 'data.seq_len' missing EQUAL at", [], "data.seq_len: no value; give <key>=<value>"),
        ("Config group override must be a string or a list", ["optimizer=null"], "optimizer=null: a group takes the name"),
        ("Could not override 'plan.tokens'.", [], "plan.tokens: is a setting of fms-plan"),
        ("Could not override 'scheduler.x'.", ["~scheduler", "scheduler.x=1"], "~scheduler has taken this group out"),
    ],
)  # fmt: skip
def test_the_message_names_the_fix(message: str, overrides: list[str], words: str) -> None:
    assert words in explain(message, overrides)


@pytest.mark.parametrize("words", [["experiment=null"], ["-m", "optimizer=null"], ["data.seqlen=3"]])
def test_what_hydra_raises_of_an_override_is_explained(words: list[str]) -> None:
    with (
        initialize_config_module("lightning_fms.conf", version_base="1.3"),
        pytest.raises((HydraException, ValueError)) as raised,
    ):
        compose("train", overrides=words[-1:])
    assert str(explained(raised.value, words)).startswith(f"{words[-1]}: ")


def test_another_error_stays_as_it_is() -> None:
    error = ValueError("lr=-1: must be positive")
    assert explained(error, ["experiment=quickstart"]) is error
