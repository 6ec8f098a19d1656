"""What a run shows in TensorBoard when it is opened first: charts for every figure that it logs, its config, its settings."""

from pathlib import Path

import pytest
import torch
from app_runs import SHORT, call
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_fms.callbacks import tensorboard_layout
from lightning_fms.callbacks.straggler import Report
from lightning_fms.callbacks.straggler_map import picture, shares_late


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        assert call(patch, *SHORT, "callbacks.straggler.every_n_steps=2") == 0
        found = EventAccumulator(str(Path("runs/quickstart/001/tensorboard").resolve()))
        found.Reload()
        return found


def layout_of(events: EventAccumulator) -> Layout:
    (config,) = events.Tensors("custom_scalars__config__")
    return Layout.FromString(config.tensor_proto.string_val[0])


def test_every_figure_that_a_run_logs_is_in_a_chart(events: EventAccumulator) -> None:
    charts = [chart for category in layout_of(events).category for chart in category.chart]
    patterns = [pattern for chart in charts for pattern in chart.multiline.tag]
    names = [name for name in events.Tags()["scalars"] if name != "epoch"]
    assert len(names) > 15
    # A source's tokens are in its share.
    lost = [
        n for n in names if not n.endswith("/tokens") and not any(tensorboard_layout.re.match(p, n) for p in patterns)
    ]
    assert lost == []


def test_each_source_has_its_share_beside_its_target(events: EventAccumulator) -> None:
    (data,) = [category for category in layout_of(events).category if category.title == "Data"]
    titles = [chart.title for chart in data.chart]
    assert {"prose: share against target", "code: share against target"} <= set(titles)
    assert not any(chart.title == "MFU" for category in layout_of(events).category for chart in category.chart)


def test_the_config_is_there_as_text_and_the_settings_as_a_row_of_hparams(events: EventAccumulator) -> None:
    (text,) = events.Tensors("config/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    assert "fms-train experiment=quickstart" in written
    assert "lr: 0.006" in written
    data = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(data).session_start_info.hparams
    assert settings["optimizer.lr"].number_value == 0.006
    assert settings["data.global_batch_size"].number_value == 4
    assert settings["strategy"].string_value == "FSDPCompileStrategy"


def test_a_slow_rank_is_a_red_line_in_the_map() -> None:
    looks = [shares_late(Report([2.0, 2.0], [0.0, 0.0], [0.0, late])) for late in (0.0, 0.5, 1.0, 4.0)]
    image = picture(looks)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 16, 32)
    assert (image[:, :8] == 255).all()  # rank 0 makes nobody wait
    assert image[1, 8, ::8].tolist() == [255, 127, 0, 0]  # nothing, a quarter of a step, a half, two
    assert (image[0] == 255).all()
