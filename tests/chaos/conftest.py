"""How much chaos: a smoke part by default, everything with `FMS_CHAOS=full`, and for as long as `FMS_CHAOS=<hours>h` says."""

import os
from pathlib import Path

import pytest

from tests.chaos.workload import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def full() -> bool:
    return os.environ.get("FMS_CHAOS", "smoke") != "smoke"
