"""Where remote files are: listing an address, and reading a range of bytes.

`s3://` and `r2://` go through litdata's own clients and downloaders, so what works for a `StreamingDataset` works here with
the same credentials. Every other scheme (`gs://`, `az://`, `hf://`, `http://`, `memory://`, ...) goes through fsspec and the
package that it names. `azure://`, litdata's word, is fsspec's `az://`.

Clients do not survive a fork, so each process makes its own.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import uuid4

import fsspec
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError
from litdata.streaming.client import R2Client, S3Client
from litdata.streaming.downloader import R2Downloader, S3Downloader

_ATTEMPTS, _FIRST_WAIT = 5, 0.2  # seconds; the waits double: 3 seconds in all
_LASTING = (
    FileNotFoundError,
    PermissionError,
    NotImplementedError,
    ImportError,
    ValueError,
    TypeError,
    NoCredentialsError,
    PartialCredentialsError,
)
_VERSION_FIELDS = (
    "ETag", "etag", "generation", "md5", "blob_id", "mtime", "last_modified", "LastModified", "updated", "created",
)  # fmt: skip
_MISSING = ("404", "NoSuchKey", "NoSuchBucket", "NotFound")

T = TypeVar("T")


class RemoteFile(NamedTuple):
    """A file that was found: its bytes, and what tells it from another under its name."""

    size: int
    version: str


class Store(Protocol):
    """How files of a scheme are found and read."""

    def find(self, url: str) -> dict[str, RemoteFile]:
        """Find the file at an address, or all below it."""
        ...

    def read(self, url: str, start: int, length: int) -> bytes:
        """Read a range; it may be shorter where the file ends.

        Raises:
            FileNotFoundError: If there is no such file.
        """
        ...


class S3Store:
    """S3 and what speaks its language.

    Args:
        scheme: `"s3"` or `"r2"`.
        options: For the client of boto3, such as `endpoint_url`.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        client, downloader = (S3Client, S3Downloader) if scheme == "s3" else (R2Client, R2Downloader)
        once = Config(
            retries={"total_max_attempts": 1}, connect_timeout=10
        )  # `persist` tries again, not a thousand times
        options = {"config": once, **options}
        self._client = client(storage_options=dict(options))
        self._downloader = downloader("", "", [], dict(options), session_options={})

    def find(self, url: str) -> dict[str, RemoteFile]:
        """Find the object at an address, or all below it."""
        bucket, _, key = url.partition("://")[2].partition("/")
        key = key.rstrip("/")
        found = {} if not key else self._list(url, bucket, key, limit=1)
        return {name: file for name, file in found.items() if name == url} or self._list(
            url, bucket, f"{key}/" if key else ""
        )

    def _list(self, url: str, bucket: str, prefix: str, limit: int | None = None) -> dict[str, RemoteFile]:
        root = f"{url.partition('://')[0]}://{bucket}"
        found = {}
        pages = self._client.client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix, PaginationConfig={"MaxItems": limit, "PageSize": limit}
        )
        for page in pages:
            for item in page.get("Contents", ()):
                if not item["Key"].endswith("/"):  # a console's stand-in for an empty folder
                    found[f"{root}/{item['Key']}"] = RemoteFile(item["Size"], item["ETag"])
        return found

    def read(self, url: str, start: int, length: int) -> bytes:
        """Read a range of an object."""
        try:
            return self._downloader.download_bytes(url, start, length, "")
        except ClientError as error:
            if _code(error) in _MISSING:
                raise FileNotFoundError(url) from None
            if _code(error) == "InvalidRange":
                return b""
            raise


class FsspecStore:
    """Any scheme that fsspec knows.

    Args:
        scheme: The scheme.
        options: For the file system of fsspec.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        self._scheme = scheme
        self._system = fsspec.filesystem("az" if scheme == "azure" else scheme, **options)

    def find(self, url: str) -> dict[str, RemoteFile]:
        """Find the file at an address, or all below it."""
        self._system.invalidate_cache()
        found = {}
        for name, info in self._system.find(self._path(url), detail=True).items():
            if info.get("size") is None:  # of a lone file, some systems say nothing here
                info = self._system.info(name)
            if info.get("size") is None:
                raise ValueError(f"the store does not say how large {name} is, so it cannot be read in parts; copy it")
            fields = [f"{field}={info[field]}" for field in _VERSION_FIELDS if info.get(field)]
            version = (
                " ".join(fields) or uuid4().hex
            )  # nothing tells it from another: do not trust it beyond this listing
            found[self._url(name)] = RemoteFile(int(info["size"]), version)
        return found

    def read(self, url: str, start: int, length: int) -> bytes:
        """Read a range of a file."""
        return self._system.cat_file(self._path(url), start=start, end=start + length)

    def _path(self, url: str) -> str:
        return self._system._strip_protocol(url.replace("azure://", "az://", 1))

    def _url(self, name: str) -> str:
        return name if "://" in name else f"{self._scheme}://{name.lstrip('/')}"


_stores: dict[tuple, Store] = {}


def open_store(url: str, options: Mapping[str, Any] | None = None) -> Store:
    """Return this process's store for an address."""
    scheme, options = url.partition("://")[0], options or {}
    key = (os.getpid(), scheme, repr(sorted(options.items())))
    if key not in _stores:
        _stores[key] = (S3Store if scheme in ("s3", "r2") else FsspecStore)(scheme, options)
    return _stores[key]


def persist(action: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Do something remote, again if it fails in a way that may pass, a bounded number of times.

    Raises:
        Exception: What it raised the last time.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return action()
        except Exception as error:
            if attempt == _ATTEMPTS - 1 or not _may_pass(error):
                raise
        sleep(_FIRST_WAIT * 2**attempt)
    raise AssertionError


def _may_pass(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        return status >= 500 or status in (408, 429) or _code(error) in ("SlowDown", "RequestTimeout")
    return not isinstance(error, _LASTING)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
