"""Connections: the filesystem that serves a remote URL, with the settings of a recipe and the credentials of this process."""

from __future__ import annotations

import functools
import os
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs

from zephon_ray.errors import UserError
from zephon_ray.recipe_fields import StorageSpec

CONNECT_SECONDS, SILENT_SECONDS = 5.0, 20.0
"""How long a store may take to accept a connection, and how long it may say nothing, before the try counts as failed. What the AWS
library does by itself, 1 and 3 seconds, is less than a busy store needs for a listing."""


def filesystem(spec: StorageSpec, url: str, pid: int, page_tries: int = 1) -> tuple[pyarrow.fs.FileSystem, str]:
    """The filesystem of a remote URL, and the name within it."""
    scheme, rest = url.split("://", 1)
    if scheme == "s3":
        return _s3(spec, rest.split("/", 1)[0], pid, page_tries), rest
    fs, path = fsspec_of(spec, url)
    fs.invalidate_cache()  # what another process wrote since must be seen
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), path


def fsspec_of(spec: StorageSpec, url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the name within it. Only s3fs, for `s3a://`, knows our settings."""
    import fsspec  # a disk and s3:// do without

    options: dict[str, Any] = {}
    if url.startswith("s3a://"):
        options = {
            "anon": spec.anonymous,
            "endpoint_url": spec.endpoint_url,  # botocore itself looks into the environment
            "client_kwargs": {"region_name": spec.region} if spec.region else {},
            "config_kwargs": {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENT_SECONDS, "retries": {"total_max_attempts": 1}},
        }
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}. Install what serves {url.split('://', 1)[0]}:// to fsspec, or mend the scheme") from error
    if options:
        fs.retries = 1  # s3fs would make five tries of each of ours
    return fs, path


@functools.lru_cache(maxsize=64)
def _s3(spec: StorageSpec, bucket: str, pid: int, page_tries: int) -> pyarrow.fs.FileSystem:
    """A connection to a bucket. It must not outlive a fork, hence `pid`."""
    options: dict[str, Any] = {
        "anonymous": spec.anonymous,
        "connect_timeout": CONNECT_SECONDS,
        "request_timeout": SILENT_SECONDS,
        # Tries are made, counted and spread here, save for single pages of a listing, which pyarrow does not show.
        "retry_strategy": pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=page_tries),
        "allow_delayed_open": True,  # a small object is written by one request instead of three
    }
    region = spec.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # pyarrow does not look for an endpoint in the environment, though the AWS library and s3fs do.
    endpoint = spec.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        options |= {"scheme": parts.scheme, "endpoint_override": parts.netloc + parts.path.rstrip("/")}
        region = region or "us-east-1"
        # Since 2025 the AWS library sends every object in chunks with a checksum behind it, and many other stores refuse that (411).
        # There is no other way to tell it.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    return pyarrow.fs.S3FileSystem(region=region or pyarrow.fs.resolve_s3_region(bucket), **options)


def forget(fs: pyarrow.fs.FileSystem | None) -> None:
    """Drop the connections that hold credentials."""
    if isinstance(fs, pyarrow.fs.PyFileSystem):
        type(fs.handler.fs).clear_instance_cache()
    else:
        _s3.cache_clear()
