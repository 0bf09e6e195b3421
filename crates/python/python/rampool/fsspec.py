"""Files in the pool, for libraries that spill through an fsspec filesystem, such as DuckDB.

    fs = rampool.fsspec.filesystem(pool)
    connection.register_filesystem(fs)
    connection.execute("SET temp_directory = 'rampool://spill'")

A file lies in regions at the servers; it is read and written there, at any place, and nothing is cached here.
Files are this process's alone; all filesystems of a pool have the same. Libraries that open URLs know
``rampool://`` and are told the pool: ``frame.to_parquet("rampool://a", storage_options={"pool": pool})``.
Needs
``rampool[fsspec]``, or ``rampool[duckdb]``.
"""

from __future__ import annotations

import io
import threading
import weakref
from typing import Any

from fsspec import register_implementation  # type: ignore[import-untyped]
from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from rampool import _native
from rampool._pool import Pool, connect

__all__ = ["RampoolFileSystem", "filesystem"]

register_implementation("rampool", "rampool.fsspec.RampoolFileSystem")

# Pages that are never written take no room.
_EXTENT_BYTES = 16 << 20


class _Tree:
    """The files of a pool."""

    def __init__(self) -> None:
        self.files: dict[str, _Content] = {}
        self.directories: set[str] = {""}
        self.lock = threading.Lock()


_trees: weakref.WeakKeyDictionary[Pool, _Tree] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def filesystem(pool: Pool) -> RampoolFileSystem:
    """The filesystem of this pool.

    >>> import fsspec
    >>> with connect(SERVERS, memory="64M") as pool:
    ...     with fsspec.open("rampool://words.txt", "w", pool=pool) as file:
    ...         written = file.write("some words")
    ...     print(filesystem(pool).cat("words.txt"))
    b'some words'
    """
    return RampoolFileSystem(pool=pool)


class _Content:
    """A file's bytes."""

    def __init__(self, pool: Pool) -> None:
        self._direct = pool._direct
        self._extents: dict[int, _native.DirectRegion] = {}
        self.size = 0
        # As elsewhere, a file that is removed is there until it is closed.
        self.opened = 0
        self.removed = False
        # Held by writes from their beginning to their end: one that began before a truncation must not undo
        # it.
        self.lock = threading.RLock()

    def _pieces(self, offset: int, nbytes: int) -> Any:
        """Extent, place in it, place in the buffer and length of each part of a range."""
        done = 0
        while done < nbytes:
            extent, within = divmod(offset + done, _EXTENT_BYTES)
            length = min(nbytes - done, _EXTENT_BYTES - within)
            yield extent, within, done, length
            done += length

    def read(self, offset: int, buffer: memoryview) -> int:
        nbytes = max(0, min(len(buffer), self.size - offset))
        started = []
        for extent, within, at, length in self._pieces(offset, nbytes):
            region = self._extents.get(extent)
            if region is None:
                buffer[at : at + length] = bytes(length)
            else:
                layout = _native.Layout.strided(length, [])
                started.append((self._direct.start_get(region, within, layout), at, length))
        for pending, at, length in started:
            taken = pending.take()
            assert taken is not None, "waited for without a limit"
            buffer[at : at + length] = memoryview(taken)
        return nbytes

    def write(self, offset: int, buffer: memoryview) -> None:
        with self.lock:
            for extent, within, at, length in self._pieces(offset, len(buffer)):
                region = self._extents.get(extent)
                if region is None:
                    region = self._extents[extent] = self._direct.open(None, _EXTENT_BYTES)
                self._direct.put(region, within, _native.Layout.strided(length, []), buffer[at : at + length])
            self.size = max(self.size, offset + len(buffer))

    def closed(self) -> None:
        """One who had it open has not any more."""
        with self.lock:
            self.opened -= 1
            if self.removed and self.opened == 0:
                self.truncate(0)

    def remove(self) -> None:
        """It has no name any more."""
        with self.lock:
            self.removed = True
            if self.opened == 0:
                self.truncate(0)

    def truncate(self, size: int) -> None:
        with self.lock:
            first = -(-size // _EXTENT_BYTES)
            for extent in [extent for extent in self._extents if extent >= first]:
                self._direct.free(self._extents.pop(extent))
            # What is behind the end reads as zeroes when the file grows again.
            if size < self.size and size % _EXTENT_BYTES and size // _EXTENT_BYTES in self._extents:
                self.write(size, memoryview(bytes(min(self.size, first * _EXTENT_BYTES) - size)))
            self.size = size


class _File(io.RawIOBase):
    """An open file. A thread that moves in it has that place for its next read or write: DuckDB seeks and
    then
    reads, from several threads at a time. Otherwise the place is everybody's, as with other files: Arrow
    writes on from whatever thread it is in."""

    def __init__(self, content: _Content, mode: str) -> None:
        super().__init__()
        self._content = content
        with content.lock:
            content.opened += 1
        # Not threading.local: threads that are not Python's lose theirs with every call.
        self._places: dict[int, int] = {}
        self._latest = content.size if "a" in mode else 0
        self._may_read = "r" in mode or "+" in mode
        self._may_write = mode.strip("bt") != "r"
        self.mode = mode

    @property
    def _at(self) -> int:
        return self._places.get(threading.get_ident(), self._latest)

    def _moved(self, place: int) -> None:
        self._places.pop(threading.get_ident(), None)
        self._latest = place

    def readable(self) -> bool:
        return self._may_read

    def writable(self) -> bool:
        return self._may_write

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._may_read:
            raise io.UnsupportedOperation("this file was opened for writing")
        at = self._at
        read = self._content.read(at, memoryview(buffer).cast("B"))
        self._moved(at + read)
        return read

    def write(self, buffer: Any) -> int:
        if not self._may_write:
            raise io.UnsupportedOperation("this file was opened for reading")
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        at = self._at
        self._content.write(at, view)
        self._moved(at + len(view))
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.size}[whence]
        if start + offset < 0:
            raise ValueError(f"there is no place {start + offset} in a file")
        self._places[threading.get_ident()] = self._latest = start + offset
        return start + offset

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        if not self._may_write:
            raise io.UnsupportedOperation("this file was opened for reading")
        size = self._at if size is None else size
        self._content.truncate(size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._content.closed()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._content.size


class RampoolFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """``rampool://`` as fsspec's other filesystems. Made by :func:`filesystem`, or with the options of
    :func:`rampool.connect`."""

    protocol = "rampool"
    root_marker = ""
    # A pool is no part of a key that could be compared.
    cachable = False

    def __init__(self, pool: Pool | None = None, **options: Any) -> None:
        super().__init__()
        self._pool = pool if pool is not None else connect(**options)
        with _making:
            tree = _trees.setdefault(self._pool, _Tree())
        self._files, self._directories, self._lock = tree.files, tree.directories, tree.lock

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = str(path).removeprefix("rampool://")
        return "/".join(part for part in text.split("/") if part)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> _File:
        name = self._strip_protocol(path)
        with self._lock:
            content = self._files.get(name)
            if content is None:
                # DuckDB makes its files by opening them for reading and writing.
                if "r" in mode and "+" not in mode:
                    raise FileNotFoundError(path)
                content = self._files[name] = _Content(self._pool)
                self._note_parents(name)
                return _File(content, mode)
        if "x" in mode:
            raise FileExistsError(path)
        if "w" in mode:
            content.truncate(0)
        return _File(content, mode)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        """Opens a file for binary or text reading and writing; writes are at the servers when they return."""
        if "b" in mode:
            return self._open(path, mode)
        text = {name: options.pop(name) for name in ("encoding", "errors", "newline") if name in options}
        raw = self._open(path, mode.replace("t", "") + "b")
        buffered = (
            io.BufferedRandom(raw)
            if raw.readable() and raw.writable()
            else io.BufferedReader(raw)
            if raw.readable()
            else io.BufferedWriter(raw)
        )
        return io.TextIOWrapper(buffered, **text)

    def _note_parents(self, name: str) -> None:
        while "/" in name:
            name = name.rsplit("/", 1)[0]
            self._directories.add(name)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of a file or directory."""
        name = self._strip_protocol(path)
        if name in self._files:
            return {"name": name, "size": self._files[name].size, "type": "file"}
        if name in self._directories:
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """What is in a directory."""
        name = self._strip_protocol(path)
        if name in self._files:
            return [self.info(name)] if detail else [name]
        if name not in self._directories:
            raise FileNotFoundError(path)
        within = f"{name}/" if name else ""
        with self._lock:
            names = sorted({*self._files, *self._directories} - {""})
        found = [each for each in names if each.startswith(within) and "/" not in each[len(within) :]]
        return [self.info(each) for each in found] if detail else found

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Makes a directory."""
        self.makedirs(path, exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a directory and those above it."""
        name = self._strip_protocol(path)
        if name in self._directories and not exist_ok:
            raise FileExistsError(path)
        with self._lock:
            self._directories.add(name)
            self._note_parents(name)

    def rmdir(self, path: str) -> None:
        """Removes an empty directory."""
        if self.ls(path, detail=False):
            raise OSError(f"{path} is not empty")
        self._directories.discard(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        """Removes a file; its memory goes back."""
        with self._lock:
            content = self._files.pop(self._strip_protocol(path), None)
        if content is None:
            raise FileNotFoundError(path)
        content.remove()

    def _rm(self, path: str) -> None:
        self.rmdir(path) if self.isdir(path) else self.rm_file(path)

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Makes an empty file. One that is open keeps its bytes: DuckDB calls this to shorten a file to a
        length that it does not say."""
        content = self._files.get(self._strip_protocol(path))
        if content is None:
            self._open(path, "wb").close()
        elif truncate and content.opened == 0:
            content.truncate(0)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Renames a file. Nothing is copied."""
        with self._lock:
            content = self._files.pop(self._strip_protocol(path1), None)
            if content is None:
                raise FileNotFoundError(path1)
            name = self._strip_protocol(path2)
            self._files[name] = content
            self._note_parents(name)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copies a file."""
        with self._open(path1, "rb") as source, self._open(path2, "wb") as target:
            while part := source.read(_EXTENT_BYTES):
                target.write(part)

    def __reduce__(self) -> Any:
        raise TypeError(
            "files in the pool are this process's alone: use threads, or arrays with a name, for several"
        )

    def created(self, path: str) -> Any:
        raise NotImplementedError("files in the pool have no times")

    def modified(self, path: str) -> Any:
        raise NotImplementedError("files in the pool have no times")
