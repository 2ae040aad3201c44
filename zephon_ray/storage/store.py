"""`Storage`: the calls of any store, each tried again while its fault passes."""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from zephon_ray.errors import StorageError
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.storage import faults
from zephon_ray.storage.connections import filesystem, forget, fsspec_of
from zephon_ray.storage.local import Listed, is_local, join, local_path, walk, write_local
from zephon_ray.storage.versions import Aged, FileVersion, aged_local, aged_remote, local_version, remote_version

if TYPE_CHECKING:
    import tenacity

log = logging.getLogger(__name__)
T = TypeVar("T")

PAGE_TRIES = 4
"""How often a page of a listing is asked for before the listing begins again from its first page."""


@dataclass(frozen=True)
class Storage:
    """Files under URLs. It holds options only, so it can be pickled; connections are made when needed, once a process.

    A local path is taken as it stands (never URL-decoded); in a URL other than `file://` the part after the scheme is the name itself.
    Missing files and refused access are Python's FileNotFoundError and PermissionError, at once.

    Args:
        spec: endpoint, region and anonymity of the object store, and how long it is tried.
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

    def version(self, url: str) -> FileVersion:
        """Which state a file is in; FileNotFoundError where there is none."""
        return local_version(local_path(url)) if is_local(url) else self._call(url, remote_version)

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
            return list(walk(local_path(url), "", depth))
        infos = self._call(url, lambda fs, path: _select(fs, path.rstrip("/"), recursive=depth != 1), page_tries=PAGE_TRIES)
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

    def ages(self, url: str) -> list[Aged]:
        """The files right in a folder with the times that they were written at; none where there is no folder."""
        try:
            if is_local(url):
                return list(aged_local(local_path(url)))
            return self._call(url, lambda fs, path: list(aged_remote(fs, path.rstrip("/"))))
        except FileNotFoundError:
            return []

    def refresh(self, url: str, after_s: float) -> None:
        """Have a local file look as if it were written now, if that was more than `after_s` seconds ago. Objects stay as they are."""
        if is_local(url):
            path = local_path(url)
            if time.time() - os.stat(path).st_mtime > after_s:
                os.utime(path)

    def write_bytes(self, url: str, data: bytes, *, exclusive: bool = False, durable: bool = True) -> None:
        """Write a file whole, or not at all; local folders are made as needed.

        Args:
            url: absolute path or URL.
            data: the content.
            exclusive: refuse to replace. On a local disk and where the store creates exclusively this is safe against others writing at
                the same time; elsewhere it is a look before the write, and the writer must read its claim back.
            durable: on a local disk, wait until it outlives a loss of power. If not, one may leave it cut.

        Raises:
            FileExistsError: `exclusive`, and the file is there.
        """
        if is_local(url):
            write_local(local_path(url), data, exclusive, durable)
        elif urlsplit(url).scheme == "s3":
            if exclusive and self.exists(url):
                raise FileExistsError(errno.EEXIST, "exists already", url)
            self._call(url, lambda fs, path: _write_stream(fs, path, data))
        else:
            self._call(url, lambda _, path: _pipe(self.spec, url, data, exclusive))

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

    def _call(self, url: str, action: Callable[[pyarrow.fs.FileSystem, str], T], page_tries: int = 1) -> T:
        """Do something with a remote file, again and again while the fault is one that passes."""

        def attempt() -> T:
            fs = None
            try:
                fs, path = filesystem(self.spec, url, os.getpid(), page_tries)
                return action(fs, path)
            except Exception as error:
                if faults.expired(error) or faults.denied(error):
                    forget(fs)  # the next try asks the providers for credentials again
                raise

        import tenacity  # with asyncio and more: processes that read a disk are there sooner without

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.spec.max_tries) | tenacity.stop_before_delay(self.spec.retry_seconds),
            wait=faults.wait,
            retry=lambda state: faults.again(state, self.spec),
            before_sleep=lambda state: self._log(url, state),
            reraise=True,
        )
        began = time.monotonic()
        try:
            return retrying(attempt)
        except Exception as error:
            told = self._told(error, url, retrying.statistics.get("attempt_number", 1), time.monotonic() - began)
            if told is error:
                raise
            raise told from error

    def _log(self, url: str, state: tenacity.RetryCallState) -> None:
        tried, rest = state.attempt_number, state.upcoming_sleep
        log.warning("storage: try %d of %d, next in %.1f s: %s: %s", tried, self.spec.max_tries, rest, url, faults.last(state))

    def _told(self, error: Exception, url: str, tries: int, seconds: float) -> Exception:
        """The error as the caller gets it."""
        if faults.denied(error):
            return PermissionError(errno.EACCES, f"the store refuses the credentials in use: {error}", url)
        if (isinstance(error, faults.LASTING) and not faults.expired(error)) or not faults.of_a_store(error):
            return error
        return StorageError(
            f"{url}: {error} ({type(error).__name__}, after {tries} of {self.spec.max_tries} tries, "
            f"{seconds:.1f} of {self.spec.retry_seconds} s). {faults.mend(error)}"
        )


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


def _write_stream(fs: pyarrow.fs.FileSystem, path: str, data: bytes) -> None:
    # Left to itself pyarrow would compress what is written under a name that ends in .gz or .zst.
    with fs.open_output_stream(path, compression=None) as stream:
        stream.write(data)


def _pipe(spec: StorageSpec, url: str, data: bytes, exclusive: bool) -> None:
    fs, path = fsspec_of(spec, url)
    if not exclusive:
        fs.pipe_file(path, data)
        return
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, "exists already", url) from error
