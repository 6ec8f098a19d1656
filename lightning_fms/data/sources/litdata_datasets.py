"""litdata's own dataset objects as sources: their folder, the form of their items, and their weights are taken over.

Order, shuffling, cache and position are ours, so an object is only asked where its data is. What would change the data
itself (a subset, a transform, decryption) is refused, because it would be ignored.
"""

import json
from pathlib import Path
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataset, TokensLoader
from litdata.constants import _INDEX_FILENAME
from litdata.streaming.item_loader import PyTreeLoader

_LOADERS = (TokensLoader, PyTreeLoader, type(None))


def folder_of(dataset: StreamingDataset) -> str:
    """Return the folder of a dataset: its address where it is remote.

    Raises:
        ValueError: If the dataset changes what the folder holds.
    """
    options = {"transform": getattr(dataset, "transform", None), "encryption": dataset._encryption}
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"a StreamingDataset with {given[0]}= cannot be a source, which reads the stored items; remove it"
        )
    if type(dataset.item_loader) not in _LOADERS:
        raise ValueError(
            f"a StreamingDataset with item_loader={type(dataset.item_loader).__name__} cannot be a source; known are "
            "TokensLoader and PyTreeLoader; name the files themselves"
        )
    if dataset.input_dir.url and (dataset.storage_options or dataset.session_options):
        raise ValueError(
            f"a StreamingDataset with storage_options= cannot be a source: they are for litdata's own clients; give its address, "
            f"{dataset.input_dir.url}, with storage_options of the source"
        )
    index = json.loads(Path(dataset.input_dir.path, _INDEX_FILENAME).read_text())
    items = sum(chunk["chunk_size"] for chunk in index["chunks"])
    if (taken := sum(int(stop - start) for start, stop in dataset.region_of_interest)) != items:
        raise ValueError(
            f"a StreamingDataset of {taken} of {items} items (subsample) cannot be a source; leave subsample at 1"
        )
    return str(dataset.input_dir.url or dataset.input_dir.path)


def sources_of(data: StreamingDataset | CombinedStreamingDataset) -> dict[str, dict[str, Any]]:
    """Return the `sources` argument that a dataset stands for: named by folder, with the weights that were given.

    litdata's weights are shares of items, and ours of tokens; without weights, shares follow the bytes.

    Raises:
        ValueError: If two of the datasets are the same folder, or one cannot be a source.
    """
    if isinstance(data, StreamingDataset):
        return {Path(folder_of(data)).name: {"path": data}}
    folders = [Path(folder_of(dataset)) for dataset in data._datasets]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"a CombinedStreamingDataset names {max(folders, key=folders.count)} twice; give each folder once"
        )
    depth = 1  # as many parts of the path as it takes to tell the folders apart
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    sources = {"/".join(f.parts[-depth:]): {"path": d} for f, d in zip(folders, data._datasets, strict=True)}
    if not data._iterate_over_all:
        for spec, weight in zip(sources.values(), data._weights, strict=True):
            spec["weight"] = float(weight)
    return sources
