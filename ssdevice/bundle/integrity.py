"""Checks of a bundle's files before any of them is trusted: bounds, names, strict JSON, sizes and hashes. Nothing here
knows the fields of a manifest; everything here assumes that someone hostile wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ssdevice import strict_json
from ssdevice.errors import BundleError, ConfigError, reading
from ssdevice.rules import Rule, check_rule, repeated_name

MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "manifest.json.sig"
MAX_MANIFEST_BYTES = 4 << 20
MAX_JSON_DEPTH = 32

SEGMENT = "[A-Za-z0-9_]([A-Za-z0-9_.+=@-]*[A-Za-z0-9_+=@-])?"
# ASCII only: no file system then has two spellings of one name, except for case, which is checked.
PATH: Rule = {
    "maxLength": 240,
    "pattern": f"^{SEGMENT}(/{SEGMENT}){{0,15}}$",
    "description": "a relative path of plain names, such as adapters/sql/a.bin",
}
# Windows reserves these names for devices, with any suffix.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def check_paths(paths: Iterable[str]) -> frozenset[str]:
    """The folders that contain these files. Raises ConfigError for names that collide on some file system."""
    files, folders = set(paths), set[str]()
    for path in files:
        check_rule("files: a name", path, PATH)
        if path.lower() in (MANIFEST_FILE, SIGNATURE_FILE):
            raise ConfigError(f"files: {path!r} may not be listed, its name is reserved")
        for segment in path.split("/"):
            if _DEVICES.fullmatch(segment):
                raise ConfigError(f"files: {path!r} has a name that Windows reserves, {segment!r}")
        parts = path.split("/")
        folders |= {"/".join(parts[:i]) for i in range(1, len(parts))}
    twice = repeated_name(path.lower() for path in [*files, *folders])
    if twice:
        raise ConfigError(f"files: {twice!r} appears twice where case does not count, or is both a file and a folder")
    return frozenset(folders)


def parse_strict(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in these bytes. Raises BundleError for anything on which two readers could disagree."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{where}: more than {MAX_MANIFEST_BYTES} bytes")
    value = strict_json.parse(data, where, BundleError, MAX_JSON_DEPTH)
    try:
        # Lone surrogates and non-finite numbers pass the parser but cannot be written again.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BundleError(f"{where}: a text has half a surrogate pair") from None
    except ValueError as error:
        raise BundleError(f"{where}: not JSON this tool can use ({error})") from None
    if not isinstance(value, dict):
        raise BundleError(f"{where}: not a JSON object")
    return value


def list_files(folder: Path, limit: int) -> dict[str, int]:
    """Path -> size of every file below a folder. Raises BundleError for anything but plain files and folders: links are
    refused wherever they lead, because everything in a bundle is in its folder."""
    found: dict[str, int] = {}
    waiting, seen = [""], 0
    while waiting:
        inside = waiting.pop()
        with reading(folder / inside, BundleError), os.scandir(folder / inside) as entries:
            for entry in entries:
                seen += 1
                path = f"{inside}{entry.name}"
                status = entry.stat(follow_symlinks=False)
                if seen > 2 * limit:
                    raise BundleError(f"{folder}: more than {2 * limit} files and folders")
                if stat.S_ISDIR(status.st_mode):
                    if path.count("/") > 15:
                        raise BundleError(f"{folder}: {path[:100]!r} is nested too deeply")
                    waiting.append(f"{path}/")
                elif stat.S_ISREG(status.st_mode):
                    found[path] = status.st_size
                else:
                    kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a plain file"
                    raise BundleError(f"{folder}: {path!r} is {kind}")
    return found


def read_bounded(file: Path, limit: int) -> bytes:
    """The content of a plain file of at most ``limit`` bytes. Raises BundleError for anything else."""
    with reading(file, BundleError):
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{file}: not a plain file")
            if status.st_size > limit:
                raise BundleError(f"{file}: {status.st_size} bytes, at most {limit} are allowed")
            return stream.read(limit)


def manifest_bytes(folder: Path) -> bytes:
    """The content of a bundle's manifest. Raises BundleError."""
    return read_bounded(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)


def file_sha256(file: Path, size: int) -> str | None:
    """sha256 of the first ``size`` bytes of a file, None if it is shorter. Raises BundleError if it is unreadable."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with reading(file, BundleError), file.open("rb", buffering=0) as stream:
        while size:
            count = stream.readinto(block[: min(size, len(block))])
            if not count:
                return None
            digest.update(block[:count])
            size -= count
    return digest.hexdigest()
