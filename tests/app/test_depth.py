"""One dial for size: `depth=12` chooses a model with its learning rate, batch and length, as the rules say."""

from pathlib import Path

import pytest
import torch
from app_runs import call
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from lightning_fms import depth as rules
from lightning_fms.command_line import with_size
from lightning_fms.config_check import ConfigError
from lightning_fms.models import Llama
from lightning_fms.run_check import check

OWN = ("data=text", "data.sources={web: somewhere/*.jsonl}", "data.tokenizer=bytes")


def composed(*words: str) -> DictConfig:
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        return compose("train", overrides=with_size(words))


@pytest.mark.parametrize(
    ("depth", "dim", "millions", "rate", "rows"),
    [
        (1, 128, 0.2, 8e-3, 8),
        (2, 128, 0.4, 6.7e-3, 8),
        (12, 768, 85, 1.8e-3, 64),
        (20, 1280, 396, 1.2e-3, 128),
        (32, 2048, 1618, 8.5e-4, 256),
    ],
)
def test_a_depth_sets_width_learning_rate_batch_and_length(depth, dim, millions, rate, rows) -> None:
    cfg = composed(f"depth={depth}", *OWN)
    check(cfg)
    net = cfg.model.net
    assert (net.n_layers, net.dim, net.n_heads) == (depth, dim, dim // 128)
    assert (cfg.optimizer.lr, cfg.data.global_batch_size) == (rate, rows)
    # 20 tokens a parameter, within a batch.
    read = cfg.trainer.max_steps * rows * cfg.data.seq_len
    assert 0 <= read - rules.tokens(depth) < rows * cfg.data.seq_len
    net.vocab_size = 257
    with torch.device("meta"):
        built = Llama(**{k: v for k, v in OmegaConf.to_container(net, resolve=True).items() if k != "_target_"})
    inner = sum(p.numel() for name, p in built.layers.named_parameters() if p.ndim == 2)
    assert inner == rules.parameters(depth) == pytest.approx(millions * 1e6, rel=0.1)


def test_parameters_grow_with_the_cube_of_the_depth_and_rates_fall() -> None:
    depths = range(2, 65, 2)
    assert all(rules.parameters(d) == pytest.approx(12 * 64**2 * d**3, rel=0.1) for d in depths)
    for rule in (rules.learning_rate, rules.init_std):
        values = [rule(d) for d in depths]
        assert values == sorted(values, reverse=True)
    assert all(rules.rows(d, 4096).bit_count() == 1 for d in depths)


def test_what_is_said_by_hand_or_by_an_experiment_wins() -> None:
    cfg = composed("depth=8", *OWN, "optimizer.lr=1e-3", "model.net.n_heads=8", "data.global_batch_size=16")
    check(cfg)
    assert (cfg.optimizer.lr, cfg.model.net.n_heads, cfg.model.net.dim) == (1e-3, 8, 512)
    assert cfg.trainer.max_steps == rules.steps(8, 4096, 16)  # the tokens stay
    quick = composed("experiment=quickstart", "depth=2")
    assert (quick.trainer.max_steps, quick.model.net.n_layers) == (240, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("depth=0",), r"depth=0: give the number of blocks, a whole number from 1 to 512"),
        (("depth=12.5",), r"depth=12\.5: give the number of blocks"),
        (("depth=deep",), r"depth=deep: give the number of blocks"),
        (("depth=true",), r"depth=True: give the number of blocks"),
        (("depth=100000",), r"depth=100000: give the number of blocks"),
        (("model=llama",), r"depth=null: model=llama and size=depth take their sizes from it; give depth="),
        (("depth=4", "model=llama_1b"), r"depth=4: this model has a size of its own; take model=llama"),
        (("depth=4", *OWN, "data.packing=none", "data.seq_len=null"), r"give data\.seq_len, or data\.global_batch_size"),
    ],
)  # fmt: skip
def test_a_depth_that_cannot_be_is_refused_with_what_to_give(words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(composed(*words))


def test_a_depth_is_enough_to_train_and_the_summary_says_what_follows(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "some words"}\n' * 200)
    words = ("data.sources.mine=texts.jsonl", "depth=1", "data.seq_len=32", "trainer.accelerator=cpu", "precision=fp32")
    short = (
        "data.global_batch_size=2",
        "data.num_workers=0",
        "trainer.max_steps=2",
        "callbacks.checkpoint.every_n_steps=2",
    )
    assert call(monkeypatch, *words, *short) == 0
    assert "depth 1: width 128, 1 head of 128, 213 k parameters without embeddings; by rule" in capsys.readouterr().out
    assert call(monkeypatch, "resume=auto", "trainer.max_steps=3") == 0
    assert "goes on from" in capsys.readouterr().out
