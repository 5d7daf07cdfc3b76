"""Files and folders that appear whole or not at all, whatever interrupts the writer.

A writer works beside the destination, in ``.NAME.ssdevice.tmp``, under a lock that ends with the
process, and renames once at the end. What a killed writer left is removed by the next writer of the
same destination.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdevice.errors import InputError, SSDeviceError

if sys.platform != "win32":
    import fcntl

MARK = ".ssdevice"
if sys.platform == "win32":
    MARK = f".ssdevice-{os.getpid()}"  # without locks names must differ
ATTEMPTS = 100
"""To begin, while other writers of the same destination come and go."""
FULL = {errno.ENOSPC, errno.EDQUOT}
FULL_WORDS = (os.strerror(errno.ENOSPC), "[MIL FileWriter]")
"""What libraries say of a full disk that write from native code: safetensors, and coremltools,
which knows no more.
"""
TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
"""Why a rename fails where something else has the name."""
TOO_LARGE_WORDS = os.strerror(errno.EFBIG)


def check_writable(out: Path, option: str = "") -> None:
    """Raise InputError, before any work, if a file or a new folder cannot be written at this path.

    It is tried, because permissions do not tell of read-only file systems: in the nearest folder
    that exists, as none is made yet.
    """
    where = f"{option} {out}".strip()
    try:
        if out.exists() and not out.is_dir():
            if not os.access(out, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        nearest = next(
            folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists()
        )
        with tempfile.TemporaryFile(dir=nearest):
            return
    except OSError as error:
        raise InputError(f"{where}: cannot be written ({error.strerror or error})") from error


def write_text(out: Path, text: str) -> None:
    """Write a file of UTF-8 text; errors name it, and leave no half of a new file."""
    fresh = not out.exists()
    with disk_errors(out):
        try:
            out.write_text(text, "utf-8")
        except OSError:
            if fresh:
                out.unlink(missing_ok=True)
            raise


def write_json(out: Path, value: Any) -> None:
    """Write plain JSON values as indented UTF-8 text; errors name the file."""
    write_text(out, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


class Stage:
    """An unfinished folder or file beside ``out``: write to ``path``; ``publish`` renames it,
    ``close`` removes what was not published.

    Raises InputError if the parent is not writable, or if another process is writing ``out``.
    """

    def __init__(self, out: Path, *, folder: bool) -> None:
        self.out = Path(os.path.abspath(out))
        self.path = self.out.with_name(f".{self.out.name}{MARK}.tmp")
        self._aside = self.out.with_name(f".{self.out.name}{MARK}.old")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = self._claim(folder)
            if self._aside.exists():  # a writer was killed while it replaced a folder
                if self.out.exists():
                    _remove(self._aside)
                else:
                    self._aside.rename(self.out)
        except OSError as error:
            raise InputError(f"{self.out.parent}: cannot write here ({error.strerror})") from error

    def _claim(self, folder: bool) -> int:
        """Make ``path``, after removing what a killed writer left there, and return the handle that
        locks it.
        """
        for _ in range(ATTEMPTS):
            fresh = True
            try:
                if folder:
                    self.path.mkdir()
                else:
                    self.path.touch(exist_ok=False)
            except FileExistsError:
                fresh = False
            try:
                lock = lock_path(self.path, wait=False, needed=not fresh)
            except BlockingIOError:
                raise InputError(
                    f"another process is writing {self.out}; wait for it, or choose another name"
                ) from None
            except FileNotFoundError:
                continue  # its writer has just finished
            mine = sys.platform == "win32" or _is_open(self.path, lock)
            if fresh and mine:
                return lock
            if mine:
                _remove(self.path)
            os.close(lock)
        raise InputError(f"{self.path} was left by another writer and cannot be removed; remove it")

    def publish(self, *, replace: bool) -> None:
        """Rename the work to ``out``, with ``replace`` instead of what is there.

        A folder is replaced by two renames; after a crash between them the next writer restores the
        old one. Raises InputError if ``out`` exists and ``replace`` is False.
        """
        sync_tree(self.path)
        if not replace and os.path.lexists(self.out):
            raise InputError(f"{self.out} exists; choose another name")
        try:
            if replace and self.out.is_dir():
                # A private folder stays private.
                self.path.chmod(stat.S_IMODE(self.out.stat().st_mode))
                os.rename(self.out, self._aside)
                os.rename(self.path, self.out)
                _remove(self._aside)
            elif replace:
                os.replace(self.path, self.out)
            else:
                os.rename(self.path, self.out)
        except OSError as error:
            if not replace and error.errno in TAKEN:
                raise InputError(
                    f"another process has created {self.out}; choose another name"
                ) from error
            raise
        _sync(self.out.parent)

    def close(self) -> None:
        """Remove what was not published and release the lock."""
        if sys.platform == "win32" or _is_open(self.path, self._lock):
            _remove(self.path)
        os.close(self._lock)


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """In this context a system error while ``out`` is written is an error of one line.

    A full disk is an SSDeviceError, in any library's words; a file beyond a limit, and any other
    system error, an InputError, which names the file. A pipe whose reader left is none of these.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if _is_full(error):
            raise SSDeviceError(
                f"the disk is full: {out} could not be written; now free: {_free(out)}"
            ) from error
        if isinstance(error, SSDeviceError):
            raise
        name = out
        if isinstance(error, OSError) and error.filename is not None:
            name = error.filename
        if _is_too_large(error):
            raise InputError(
                f"{name} could not be written: File too large for a limit of this process "
                "(ulimit -f) or for the file system"
            ) from error
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{name}: {error.strerror}") from error
        raise


def _free(out: Path) -> str:
    """What is free where ``out`` is, and where temporary files are."""
    places = dict.fromkeys([out.parent, Path(tempfile.gettempdir())])
    return ", ".join(
        f"{shutil.disk_usage(place).free >> 20} MiB in {place}"
        for place in places
        if place.is_dir()
    )


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return any(words in str(error) for words in FULL_WORDS)


def _is_too_large(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.EFBIG
    return TOO_LARGE_WORDS in str(error)


def sync_tree(path: Path) -> None:
    """Flush a file, or a folder with its contents, to the disk, so that no crash leaves a name with
    missing data.
    """
    for each in (path, *path.rglob("*")):
        _sync(each)


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def lock_path(path: Path, *, wait: bool = True, needed: bool = False) -> int:
    """A handle that locks a file or folder until it is closed or the process ends.

    Raises BlockingIOError if another process holds it and ``wait`` is False. Systems without locks
    lock nothing, or raise OSError if one is ``needed``.
    """
    if sys.platform == "win32":
        return os.open(os.devnull, os.O_RDONLY)
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needed or isinstance(error, BlockingIOError):
            os.close(handle)
            raise
    return handle


def _is_open(path: Path, handle: int) -> bool:
    """Whether a path still is the file that was opened as ``handle``, not renamed or removed
    meanwhile.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
