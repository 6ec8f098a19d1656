"""Readers that a config names."""

from typing import Any


def read(record: dict, length: int) -> dict[str, Any]:
    return {"x": [record["n"]] * length}


class Read:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, record: dict) -> dict[str, Any]:
        return read(record, self.length)
