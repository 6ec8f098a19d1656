"""A user's own Hydra app finds the suite's configs without naming where they are."""

from pathlib import Path

from hydra import compose, initialize_config_dir


def test_a_users_app_composes_our_groups_and_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, {override model: own}, _self_]\nname: mine\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.yaml").write_text("_target_: my.Model\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("mine", overrides=["precision=fp32"])
    assert (cfg.name, cfg.model._target_, cfg.precision.name) == ("mine", "my.Model", "32-true")
    assert cfg.data._target_ == "lightning_fms.data.RescalableDataModule"
