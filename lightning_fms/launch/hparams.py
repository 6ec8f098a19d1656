"""The jobs of a sweep in TensorBoard's HParams: a session for each, with its settings, its figures, and whether it succeeded.

Written with TensorBoard's own messages, because the functions that make them want TensorFlow, or Torch.
"""

import json
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_fms.launch.jobs import Job
from lightning_fms.launch.report import settings


def write_session(folder: Path, job: Job) -> None:
    """Write a job that has ended into `folder`, which is a run of TensorBoard's."""
    now = time.time()
    start = SessionStartInfo(start_time_secs=now - job.seconds, group_name=f"{job.number:03}")
    for key, text in settings(job).items():
        value = _plain(text)
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = text
    end = SessionEndInfo(status=STATUS_SUCCESS if job.status == "done" else STATUS_FAILURE, end_time_secs=now)
    values = [
        _plugin_value(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start)),
        _plugin_value(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)),
    ]
    if job.result is not None:
        figures = dict(job.result.metrics) | ({} if job.value is None else {"objective": job.value})
        values += [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
    writer = EventFileWriter(str(folder))
    step = job.result.steps if job.result is not None else 0
    for one in values:
        writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=[one])))
    writer.close()


def _plugin_value(tag: str, data: HParamsPluginData) -> Summary.Value:
    data.version = metadata.PLUGIN_DATA_VERSION
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    return Summary.Value(tag=tag, tensor=metadata.NULL_TENSOR, metadata=SummaryMetadata(plugin_data=plugin))


def _plain(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
