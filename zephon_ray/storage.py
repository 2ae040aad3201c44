"""Storage: files and folders under any URL, and the only place where anything is tried twice.

Local paths (plain, or `file://` URLs) and `s3://` go through pyarrow's filesystems, every other URL through fsspec. Only faults that
pass (connections, time-outs, a store that asks to slow down, credentials that ran out) are tried again, and never on a local disk.
Credentials come from the environment alone. What a file holds is no concern of this module.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.fs
import tenacity

from zephon_ray.errors import StorageError
from zephon_ray.recipe_fields import StorageSpec

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_TRIES = 8
"""How often a call to a store is made before it counts as failed."""
MAX_SECONDS = 120.0
"""How long after its first try a call is not tried again, in seconds."""
FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0
"""Waits are drawn evenly from [0, FIRST_WAIT * 2^n], at most LONGEST_WAIT seconds, so that workers do not return all at once."""

# What stores and their clients say of faults that pass. pyarrow gives AWS's answers as text in an OSError, so text is all there is.
_PASSING = (
    "slow down", "slow_down", "slowdown", "throttl", "too many requests", "service_unavailable", "service unavailable",
    "serviceunavailable", "internal_failure", "internalerror", "internal error", "bad gateway", "gateway timeout", "request_timeout",
    "requesttimeout", "timed out", "timeout", "network_connection", "connection", "couldn't connect", "could not connect", "curlcode",
    "incomplete", "http status 429", "http status 500", "http status 502", "http status 503", "http status 504",
    "http response code: 500", "http response code: 503",
)  # fmt: skip
_EXPIRED = (
    "expiredtoken",
    "expired_token",
    "expired token",
    "token has expired",
    "tokenrefreshrequired",
    "request_expired",
    "unknown (http status 400)",  # what AWS's client makes of an answer that names no cause, as one to HEAD never does
)
_DENIED = ("access_denied", "access denied", "accessdenied", "http status 403")
_PASSING_ERRNO = {
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}  # fmt: skip
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


class Listed(NamedTuple):
    """One entry of a listing.

    Args:
        path: relative to the folder, parts joined by `/`.
        size: bytes; -1 for a local link that leads nowhere.
        is_directory_mark: an object of no bytes that stands for a folder.
    """

    path: str
    size: int
    is_directory_mark: bool


@dataclass(frozen=True)
class Storage:
    """Files under URLs. It holds options only, so it can be pickled; connections are made when needed, once a process.

    A local path is taken as it stands (never URL-decoded); in a URL other than `file://` the part after the scheme is the name itself.
    Missing files and refused access are Python's FileNotFoundError and PermissionError, at once.

    Args:
        spec: endpoint, region and anonymity of the object store.
    """

    spec: StorageSpec

    def open_input(self, url: str, *, read_ahead: int = 0, mapped: bool = False) -> pa.NativeFile:
        """Open a file for reading at any place.

        Args:
            url: absolute path or URL.
            read_ahead: least number of bytes to ask a remote store for at a time; 0 asks for what is read and no more.
            mapped: map a local file into memory.

        Raises:
            FileNotFoundError, PermissionError: as the store says.
            StorageError: the store goes on failing, here or in a later read.
        """
        if is_local(url):
            path = local_path(url)
            return pa.memory_map(path) if mapped and os.path.getsize(path) else pa.OSFile(path)
        return pa.PythonFile(_RemoteFile(self, url, read_ahead), mode="r")

    def read_bytes(self, url: str) -> bytes:
        """The whole file."""
        with self.open_input(url) as file:
            return bytes(file.read())

    def size(self, url: str) -> int:
        """Bytes of a file; FileNotFoundError where there is none."""
        if is_local(url):
            return os.path.getsize(local_path(url))
        return self._call(url, _size)

    def kind(self, url: str) -> Literal["file", "folder"] | None:
        """What the name stands for: None where there is nothing."""
        if is_local(url):
            path = local_path(url)
            return "folder" if os.path.isdir(path) else "file" if os.path.isfile(path) else None
        info = self._call(url, lambda fs, path: fs.get_file_info(path.rstrip("/")))
        if info.type == pyarrow.fs.FileType.File:
            return "file"
        return "folder" if info.type == pyarrow.fs.FileType.Directory else None

    def list_files(self, url: str, *, depth: int | None = None) -> list[Listed]:
        """The files under a folder, in no particular order. Links to folders are not followed.

        Args:
            url: the folder.
            depth: how many path parts an entry may have; None for any number.

        Raises:
            FileNotFoundError, PermissionError: also for a folder below.
        """
        if is_local(url):
            return list(_walk(local_path(url), "", depth))
        infos = self._call(url, lambda fs, path: _select(fs, path.rstrip("/"), recursive=depth != 1))
        sizes = {path: size for path, size in infos if depth is None or path.count("/") < depth}
        parents = {path[:at] for path in sizes for at in _slashes(path)}
        return [Listed(path, size, size == 0 and (path.endswith(("/", "_$folder$")) or path in parents)) for path, size in sizes.items()]

    def names(self, url: str) -> list[str]:
        """The names of the files right in a folder, in no particular order; none where there is no folder.

        Raises:
            PermissionError: the folder may not be read.
            StorageError: the store goes on failing.
        """
        try:
            return [entry.path for entry in self.list_files(url, depth=1)]
        except FileNotFoundError:
            return []

    def write_bytes(self, url: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a file whole, or not at all; local folders are made as needed.

        Args:
            url: absolute path or URL.
            data: the content.
            exclusive: refuse to replace. On a local disk and where the store creates exclusively this is safe against others writing at
                the same time; elsewhere it is a look before the write, and the writer must read its claim back.

        Raises:
            FileExistsError: `exclusive`, and the file is there.
        """
        if is_local(url):
            _write_local(local_path(url), data, exclusive)
        elif urlsplit(url).scheme == "s3":
            if exclusive and self.exists(url):
                raise FileExistsError(errno.EEXIST, "exists already", url)
            self._call(url, lambda fs, path: _write_stream(fs, path, data))
        else:
            self._call(url, lambda _, path: _pipe(url, data, exclusive))

    def exists(self, url: str) -> bool:
        """Whether there is a file or folder of that name."""
        return os.path.lexists(local_path(url)) if is_local(url) else self.kind(url) is not None

    def delete(self, url: str) -> None:
        """Delete a file; nothing happens where there is none."""
        try:
            if is_local(url):
                os.unlink(local_path(url))
            else:
                self._call(url, lambda fs, path: fs.delete_file(path))
        except FileNotFoundError:
            pass

    def makedirs(self, url: str, *, private: bool = False) -> None:
        """Make a folder and those above it, where the store has folders. One that exists is left as it is.

        Args:
            url: the folder.
            private: on a local disk only its owner may enter it.

        Raises:
            PermissionError, NotADirectoryError: it cannot be made there.
        """
        if is_local(url):
            os.makedirs(local_path(url), mode=0o700 if private else 0o777, exist_ok=True)
        elif urlsplit(url).scheme != "s3":
            self._call(url, lambda fs, path: fs.create_dir(path, recursive=True))

    def is_local(self, url: str) -> bool:
        return is_local(url)

    def join(self, url: str, *parts: str) -> str:
        """The name of something below a folder; parts are taken as they stand."""
        return join(url, *parts)

    def _call(self, url: str, action: Callable[[pyarrow.fs.FileSystem, str], T]) -> T:
        """Do something with a remote file, again and again while the fault is one that passes."""

        def attempt() -> T:
            try:
                return action(*_filesystem(self.spec, url, os.getpid()))
            except Exception as error:
                if _expired(error):
                    _s3.cache_clear()  # the next try asks the providers for new credentials
                raise

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(MAX_TRIES) | tenacity.stop_after_delay(MAX_SECONDS),
            wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
            retry=tenacity.retry_if_exception(_passing),
            before_sleep=lambda state: log.warning("storage: try %d of %d: %s: %s", state.attempt_number, MAX_TRIES, url, _last(state)),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _LASTING:
            raise
        except (OSError, pa.ArrowException) as error:
            if any(word in str(error).lower() for word in _DENIED):
                raise PermissionError(errno.EACCES, str(error), url) from error
            tries = retrying.statistics.get("attempt_number", 1)
            raise StorageError(
                f"{url}: {error} ({type(error).__name__}, after {tries} of {MAX_TRIES} tries). "
                "Check the name, the store's endpoint and the credentials in the environment; if it is overloaded, run fewer workers."
            ) from error


class _RemoteFile(io.RawIOBase):
    """A remote file as ranges of bytes, each read on its own, so that a failed read is made again where it began.

    pyarrow serialises the calls of one file.
    """

    def __init__(self, storage: Storage, url: str, read_ahead: int) -> None:
        self._storage, self._url, self._read_ahead = storage, url, read_ahead
        self._at = 0
        self._block, self._block_at = b"", 0
        self._handle: Any = None
        self._size = storage._call(url, self._open)

    def _open(self, fs: pyarrow.fs.FileSystem, path: str) -> int:
        """Open the file where the store knows open files; its size in bytes."""
        if isinstance(fs, pyarrow.fs.PyFileSystem):
            return _size(fs, path)
        self._handle = fs.open_input_file(path)
        return int(self._handle.size())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        wanted = max(0, self._size - self._at)
        wanted = wanted if size is None or size < 0 else min(size, wanted)
        start = self._at - self._block_at
        if not 0 <= start <= start + wanted <= len(self._block):
            span = min(max(wanted, self._read_ahead), self._size - self._at)
            block = self._storage._call(self._url, functools.partial(self._fetch, self._at, span)) if wanted else b""
            if span <= self._read_ahead:
                self._block, self._block_at, start = block, self._at, 0
            else:
                self._at += len(block)
                return block
        self._at += wanted
        return self._block[start : start + wanted]

    def _fetch(self, at: int, size: int, fs: pyarrow.fs.FileSystem, path: str) -> bytes:
        if isinstance(fs, pyarrow.fs.PyFileSystem):
            data = bytes(fs.handler.fs.cat_file(path, start=at, end=at + size))
        else:
            try:
                if self._handle is None:
                    self._open(fs, path)
                data = bytes(self._handle.read_at(size, at))
            except OSError:
                self._handle = None
                raise
        if len(data) != size:
            raise ConnectionError(f"incomplete answer: {len(data)} of {size} bytes from byte {at}")
        return data

    def close(self) -> None:
        self._block = b""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        super().close()


def is_local(url: str) -> bool:
    """Whether a URL is a path on this machine."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> str:
    """The path of a local URL: `file://` is decoded, a path is taken as it stands."""
    return unquote(urlsplit(url.replace("?", "%3F").replace("#", "%23")).path) if url.startswith("file://") else url


def join(url: str, *parts: str) -> str:
    """The name of something below a folder; parts are taken as they stand."""
    if url.startswith("file://"):
        url = local_path(url)
    return "/".join([url[:-1] if url.endswith("/") else url, *parts])


def _filesystem(spec: StorageSpec, url: str, pid: int) -> tuple[pyarrow.fs.FileSystem, str]:
    """The filesystem of a remote URL, and the name within it."""
    scheme, rest = url.split("://", 1)
    if scheme == "s3":
        return _s3(spec, rest.split("/", 1)[0], pid), rest
    fs, path = fsspec.core.url_to_fs(url)
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), path


@functools.lru_cache(maxsize=64)
def _s3(spec: StorageSpec, bucket: str, pid: int) -> pyarrow.fs.FileSystem:
    """A connection to a bucket. It must not outlive a fork, hence `pid`."""
    options: dict[str, Any] = {
        "anonymous": spec.anonymous,
        "retry_strategy": pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1),  # tries are made, counted and spread here
        "allow_delayed_open": True,  # a small object is written by one request instead of three
    }
    region = spec.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if spec.endpoint_url is not None:
        parts = urlsplit(spec.endpoint_url)
        options |= {"scheme": parts.scheme, "endpoint_override": parts.netloc + parts.path.rstrip("/")}
        region = region or "us-east-1"
    return pyarrow.fs.S3FileSystem(region=region or pyarrow.fs.resolve_s3_region(bucket), **options)


def _passing(error: BaseException) -> bool:
    """Whether a fault may be gone at the next try."""
    if isinstance(error, ConnectionError | TimeoutError) or _expired(error):
        return True
    if isinstance(error, _LASTING) or not isinstance(error, OSError | pa.ArrowException):
        return False
    text = str(error).lower()
    return error.__dict__.get("errno", getattr(error, "errno", None)) in _PASSING_ERRNO or any(word in text for word in _PASSING)


def _expired(error: BaseException) -> bool:
    return isinstance(error, OSError) and any(word in str(error).lower() for word in _EXPIRED)


def _last(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _slashes(path: str) -> Iterator[int]:
    return (at for at, character in enumerate(path) if character == "/")


def _size(fs: pyarrow.fs.FileSystem, path: str) -> int:
    info = fs.get_file_info(path)
    if info.type != pyarrow.fs.FileType.File:
        raise FileNotFoundError(errno.ENOENT, "no such file", path)
    return int(info.size)


def _select(fs: pyarrow.fs.FileSystem, folder: str, *, recursive: bool) -> list[tuple[str, int]]:
    """(path relative to the folder, size) of the files of a remote folder."""
    infos = fs.get_file_info(pyarrow.fs.FileSelector(folder, recursive=recursive))
    files = (info for info in infos if info.type == pyarrow.fs.FileType.File and info.path != folder)
    return [(info.path[len(folder) + 1 :], info.size or 0) for info in files]


def _walk(folder: str, prefix: str, depth: int | None) -> Iterator[Listed]:
    """The files of a local folder. os.walk would pass over a folder that it may not read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth is None or depth > 1:
                    yield from _walk(entry.path, f"{prefix}{entry.name}/", None if depth is None else depth - 1)
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                yield Listed(prefix + entry.name, -1, False)
                continue
            if stat.S_ISREG(status.st_mode):
                yield Listed(prefix + entry.name, status.st_size, False)


def _write_local(path: str, data: bytes, exclusive: bool) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".zephon-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        if exclusive:
            os.link(temporary, path)  # unlike a rename, it fails where the name is taken
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write_stream(fs: pyarrow.fs.FileSystem, path: str, data: bytes) -> None:
    # Left to itself pyarrow would compress what is written under a name that ends in .gz or .zst.
    with fs.open_output_stream(path, compression=None) as stream:
        stream.write(data)


def _pipe(url: str, data: bytes, exclusive: bool) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    if not exclusive:
        fs.pipe_file(path, data)
        return
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "exists already", url) from error
