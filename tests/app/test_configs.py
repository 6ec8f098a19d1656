"""Every config that ships: it composes, every key fits its target, and its head says how to run it."""

from importlib.resources import files
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import lightning_fms.conf
from lightning_fms.command_line import with_own_sources
from lightning_fms.config_check import ConfigError
from lightning_fms.run_check import check, devices_asked

CONF = Path(str(files(lightning_fms.conf)))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("experiment", "paths", "hardware")  # hardware is for fms-plan
)
# What an experiment leaves to the user.
OWN_DATA = ("data.sources={web: somewhere/*.jsonl}", "data.tokenizer=tokenizer.json")


def composed(*overrides: str) -> DictConfig:
    with initialize_config_module("lightning_fms.conf", version_base="1.3"):
        return compose("train", overrides=list(overrides))


def test_the_groups_are_those_of_the_design() -> None:
    groups = {path.name for path in CONF.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert groups >= {
        "callbacks", "data", "debug", "experiment", "kernels", "logger", "model", "optimizer", "paths", "precision",
        "scheduler", "strategy", "trainer",
    }  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_fits(experiment: str) -> None:
    overrides = [f"experiment={experiment}"]
    cfg = composed(*overrides)
    own = [*overrides, *(OWN_DATA if OmegaConf.is_missing(cfg.data, "sources") else ())]
    check(composed(*own))
    assert cfg.name == experiment


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_smoke_run_is_short_whatever_the_experiment_says(experiment: str) -> None:
    cfg = composed(f"experiment={experiment}", "debug=smoke")
    assert (cfg.trainer.max_steps, cfg.trainer.log_every_n_steps, cfg.scheduler.warmup_steps) == (4, 1, 1)
    assert (cfg.data.val_every_n_steps, cfg.data.val_steps) == (2, 1)
    assert cfg.debug.traceback
    assert composed(f"experiment={experiment}", "debug=smoke", "trainer.max_steps=7").trainer.max_steps == 7


@pytest.mark.parametrize("chosen", [("data=text", *OWN_DATA), ("data=quickstart",)])
def test_what_a_resume_may_change_needs_no_plus(chosen: tuple[str, ...]) -> None:
    cfg = composed(*chosen, "data.on_error=quarantine", "data.max_epochs={web: 2}", "data.packing=best_fit")
    check(cfg)
    assert (cfg.data.on_error, cfg.data.max_epochs) == ("quarantine", {"web": 2})


def test_a_group_that_the_model_does_without_can_be_left_out() -> None:
    check(composed("experiment=quickstart", "~scheduler", "model.scheduler=null"))


def test_a_command_need_not_repeat_the_default_folder() -> None:
    assert composed().paths.root == "runs"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes_and_fits(option: str) -> None:
    needed = {"data=text": OWN_DATA, "model=llama": ("depth=4",), "size=depth": ("depth=4", "model=llama")}
    check(composed(option, *needed.get(option, ())))


def items(reader: str, root: Path) -> tuple[str, ...]:
    return (
        "data=text", f"data.sources={{web: {root}}}", "data.tokenizer=bytes", "data.packing=none", "data.seq_len=null",
        "data.num_workers=0", f"data.reader={reader}",
    )  # fmt: skip


@pytest.mark.parametrize(
    "reader",
    ["{_target_: tests.app.items.read, _partial_: true, length: 4}", "{_target_: tests.app.items.Read, length: 4}"],
)
def test_a_reader_comes_from_the_config(reader: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 3}\n')
    cfg = composed(*items(reader, tmp_path), "data.global_batch_size=2", "data.listings=null", "data.quarantine=null")
    check(cfg)
    data = instantiate(cfg.data, _convert_="all")
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["x"].tolist() == [[3] * 4]


def test_an_argument_that_a_reader_does_not_have(tmp_path: Path) -> None:
    reader = "{_target_: tests.app.items.read, _partial_: true, lenght: 4}"
    with pytest.raises(
        ConfigError, match=r"data\.reader\.lenght=4: read has no argument 'lenght'; did you mean 'length'"
    ):
        check(composed(*items(reader, tmp_path)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_begins_with_the_command_that_runs_it(experiment: str) -> None:
    # Hydra reads the package directive from the very first line, and there only.
    directive, command, *_ = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert directive == "# @package _global_"
    assert f"experiment={experiment}" in command
    assert command.startswith(("# fms-train ", "# torchrun "))


def test_what_the_user_must_give_is_asked_for_by_name() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources is missing: give data\.sources\.<name>="):
        check(composed("experiment=llama_1b"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+trainer.max_stepz=5",
            r"trainer\.max_stepz=5: Trainer has no argument 'max_stepz'; did you mean 'max_steps'",
        ),
        ("trainer.max_steps=many", r"trainer\.max_steps=many: Trainer wants a whole number"),
        ("optimizer.lr=fast", r"optimizer\.lr=fast: AdamW wants"),
        ("model.net.dim=wide", r"model\.net\.dim=wide: Llama wants a whole number"),
        ("optimizer._target_=torch.optim.AdamX", r"AdamX: cannot be imported"),
        ("+trainer.precision=16-mixed", r"trainer\.precision would have no effect: give precision=<option>"),
        ("+trainer.strategy=ddp", r"trainer\.strategy would have no effect: give strategy=<option>"),
        ("+trainer.default_root_dir=x", r"give paths\.root=<folder>"),
        ("+trainer.callbacks=[]", r"give callbacks=<option>"),
        ("trainer.devices=0", r"trainer\.devices=0: give a number of devices"),
        ("trainer.num_nodes=2", r"trainer\.num_nodes=2: the nodes must be started together; use torchrun"),
    ],
)
def test_a_mistake_is_found_before_anything_is_built(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(composed("experiment=quickstart", override))


@pytest.mark.parametrize(
    "override",
    [
        "strategy.activation_checkpointing=selective",
        "precision.emulate=true",
        "precision.recipe=rowwise",
        "strategy.shard=4",
    ],
)
def test_what_one_sweeps_over_needs_no_plus(override: str) -> None:
    check(composed("precision=fp8", override))


@pytest.mark.parametrize(("devices", "number"), [("3", 3), ("[0,2]", 2), ("'0,2'", 2), ("auto", 1)])
def test_the_number_of_devices_follows_from_every_way_to_write_it(devices: str, number: int) -> None:
    assert devices_asked(composed(f"trainer.devices={devices}", "trainer.accelerator=cpu").trainer) == number


def test_the_model_follows_the_shapes_that_it_names() -> None:
    net = composed("model=llama_8b").model.net
    assert (net.dim, net.n_layers, net.n_heads, net.n_kv_heads, net.ffn_dim) == (4096, 32, 32, 8, 14336)


def test_own_sources_come_with_the_rows_of_a_laptop_where_the_model_is_one_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = "data.sources.mine=a"
    rows = ["data.seq_len=256", "data.global_batch_size=8", "data.micro_batch_size=null"]
    assert with_own_sources([mine, "model=llama_tiny"])[:5] == ["data=text", "data.tokenizer=bytes", *rows]
    assert " ".join(rows) in capsys.readouterr().out
    assert rows[0] not in with_own_sources([mine, "data.seq_len=64"])
    for other in ("model=llama_1b", "depth=12", "experiment=quickstart"):
        assert not set(rows) & set(with_own_sources([mine, other]))
