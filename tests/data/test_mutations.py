"""Damaged files never end a run in another way than is documented, and never move a position. `MUTATIONS` sets how many."""

import os
from pathlib import Path

import pytest

from tests.data.mutations import FORMATS, run_cases, shrink

CASES = int(os.environ.get("MUTATIONS", "12"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_cut_and_inserted_bytes(kind: str, tmp_path: Path) -> None:
    seen = run_cases(kind, range(CASES), tmp_path, changes=False)
    assert sum(seen.values()) == CASES
    assert not [what for what in seen if what.startswith("FAILED")]


@pytest.mark.parametrize("kind", FORMATS)
def test_files_cut_replaced_and_removed_while_they_are_read(kind: str, tmp_path: Path) -> None:
    seen = run_cases(kind, range(CASES // 2), tmp_path, changes=True)
    assert seen == {"read": CASES // 2}
