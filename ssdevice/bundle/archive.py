"""Bundles as one file: an uncompressed zip whose entries begin at multiples of 4096 bytes, the manifest first.

Any unzip program opens a ``.ssb``. This reader accepts only one form: stored entries, back to back from the first byte
to the central directory, with nothing before, between or after them. So entries cannot overlap, be larger than they
claim, or look different to another program. The alignment lets a reader map weights without unpacking.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ssdevice import arguments
from ssdevice.bundle.folder import OWN_FILES, PACKED_SUFFIX, Bundle, check_listing, check_out, check_outside
from ssdevice.bundle.integrity import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    SIGNATURE_FILE,
    list_files,
    repeated_name,
    stream_sha256,
)
from ssdevice.bundle.manifest import MAX_FILE_BYTES, MAX_FILES, Manifest, parse_manifest
from ssdevice.bundle.signature import MAX_SIGNATURE_BYTES, verify_signature
from ssdevice.bundle.staging import Stage, disk_errors
from ssdevice.errors import BundleError, InputError

ALIGNMENT = 4096
ZIP64_FROM = 1 << 30
_LOCAL = struct.Struct("<4s5H3L2H")
_END = struct.Struct("<4s4H2LH")
_PADDING = struct.Struct("<3H")
_ZIP64 = struct.Struct("<2H2Q")
_PADDING_ID, _ZIP64_ID = 0xD935, 1
_UTF8_NAME = 0x800
_MAX_DIRECTORY = MAX_FILES * 512
_FULL32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Entry:
    """A stored file: its ``size`` in bytes and the offset of its ``data`` in the archive."""

    name: str
    size: int
    data: int


def pack(bundle: Bundle, out: str | Path) -> Path:
    """Write a bundle to one file, ``NAME.ssb``, and check the hashes on the way.

    Raises InputError if ``out`` exists or has another suffix, BundleError if a file does not match the manifest.
    """
    out = arguments.path("a packed bundle", out)
    if out.suffix != PACKED_SUFFIX:
        raise InputError(f"{out}: a packed bundle is named *{PACKED_SUFFIX}")
    if out.exists():
        raise InputError(f"{out} exists; choose another name")
    check_outside(bundle.folder, out)
    own = [name for name in OWN_FILES if (bundle.folder / name).is_file()]
    with disk_errors(out), closing(Stage(out, folder=False)) as stage:
        with stage.path.open("wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
            for name in (*own, *bundle.manifest.files):
                digest = _append(archive, raw, name, bundle.folder / name)
                if name not in own and digest != bundle.manifest.files[name].sha256:
                    raise BundleError(f"{bundle.folder / name} is damaged: its sha256 is not the one in the manifest")
        read_packed_manifest(stage.path)
        stage.publish(replace=False)
    return out


def _append(archive: zipfile.ZipFile, raw: IO[bytes], name: str, file: Path) -> str | None:
    with file.open("rb", buffering=0) as source:
        info = zipfile.ZipInfo(name)  # no date, so that the same bundle gives the same bytes
        info.create_system = 3
        info.external_attr = (stat.S_IFREG | 0o644) << 16
        info.file_size = os.fstat(source.fileno()).st_size
        large = info.file_size > ZIP64_FROM
        start = raw.tell() + _LOCAL.size + len(name) + (20 if large else 0) + _PADDING.size
        zeros = -start % ALIGNMENT
        info.extra = _PADDING.pack(_PADDING_ID, 2 + zeros, ALIGNMENT) + bytes(zeros)
        with archive.open(info, "w", force_zip64=large) as entry:
            digest = stream_sha256(source, info.file_size, entry)
        info.extra = b""  # otherwise the central directory repeats it
    return digest


def unpack(
    packed: str | Path, folder: str | Path, *, overwrite: bool = False, require_signature: Path | None = None
) -> Bundle:
    """Unpack a ``.ssb`` to a folder, which appears only when every byte has been checked.

    Raises BundleError for an archive that is damaged or in another form, InputError if ``folder`` exists (with
    ``overwrite``: unless it is a bundle), SSDeviceError if the disk is full.
    """
    packed, folder = arguments.path("a packed bundle", packed), arguments.path("a folder", folder)
    check_out(folder, overwrite)
    with _open(packed) as stream, disk_errors(folder):
        entries = read_entries(stream, packed)
        manifest = _manifest(stream, packed, entries, require_signature)
        with closing(Stage(folder, folder=True)) as stage:
            for entry in entries:
                target = stage.path / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                stream.seek(entry.data)
                with target.open("wb") as to:
                    digest = stream_sha256(stream, entry.size, to)
                if entry.name not in OWN_FILES and digest != manifest.files[entry.name].sha256:
                    raise BundleError(f"{packed}: {entry.name!r} is damaged: its sha256 is not the one in the manifest")
            check_listing(stage.path, list_files(stage.path, MAX_FILES), manifest)
            check_out(folder, overwrite)
            stage.publish(replace=overwrite)
    return Bundle(folder, manifest)


def read_packed_manifest(packed: str | Path) -> Manifest:
    """The manifest of a ``.ssb``. Checks the form of the archive, but not the contents of its files."""
    packed = Path(packed)
    with _open(packed) as stream:
        return _manifest(stream, packed, read_entries(stream, packed), None)


def _open(packed: Path) -> IO[bytes]:
    if not packed.is_file():
        raise BundleError(f"{packed}: no such packed bundle")
    try:
        return packed.open("rb")
    except OSError as error:
        raise BundleError(f"{packed}: cannot be read ({error.strerror})") from error


def _manifest(stream: IO[bytes], packed: Path, entries: list[Entry], key: Path | None) -> Manifest:
    """The manifest. Raises BundleError unless its names and sizes agree with the entries."""
    if not entries or entries[0].name != MANIFEST_FILE or entries[0].size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{packed}: its first entry is not a {MANIFEST_FILE} of at most {MAX_MANIFEST_BYTES} bytes")
    signature = next((entry for entry in entries if entry.name == SIGNATURE_FILE), None)
    if signature is not None and signature.size > MAX_SIGNATURE_BYTES:
        raise BundleError(f"{packed}: {SIGNATURE_FILE} has {signature.size} bytes, at most {MAX_SIGNATURE_BYTES}")
    data = _content(stream, entries[0])
    if key is not None:
        if signature is None:
            raise BundleError(f"{packed}: no {SIGNATURE_FILE}, but a signature is required")
        verify_signature(data, _content(stream, signature), key)
    manifest = parse_manifest(data, f"{packed}: {MANIFEST_FILE}")
    check_listing(packed, {entry.name: entry.size for entry in entries}, manifest)
    return manifest


def _content(stream: IO[bytes], entry: Entry) -> bytes:
    stream.seek(entry.data)
    return stream.read(entry.size)


class _File(io.FileIO):
    """A file that limits each read to the largest central directory allowed: zipfile trusts the end record."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size} bytes")
        return super().read(_MAX_DIRECTORY if size is None or size < 0 else size) or b""


def read_entries(stream: IO[bytes], packed: Path) -> list[Entry]:
    """The entries of a ``.ssb`` in order. Raises BundleError unless they fill it exactly."""
    length = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, length - _END.size))
    end = stream.read(_END.size)
    if not end.startswith(b"PK\x05\x06") or len(end) != _END.size or _END.unpack(end)[-1]:
        raise BundleError(f"{packed}: not a packed bundle, or cut short: no end record in its last {_END.size} bytes")
    try:
        with _File(stream.fileno(), closefd=False) as file, zipfile.ZipFile(file) as archive:
            found, directory = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error) as error:
        raise BundleError(f"{packed}: its directory is damaged ({error})") from error
    if len(found) > MAX_FILES + len(OWN_FILES):
        raise BundleError(f"{packed}: {len(found)} entries, at most {MAX_FILES} are allowed")
    entries: list[Entry] = []
    at = 0
    for info in found:
        if info.header_offset != at:
            shown = ascii(info.orig_filename[:100])
            raise BundleError(f"{packed}: {shown} begins at byte {info.header_offset}, the one before ends at {at}")
        entries.append(_entry(stream, packed, info))
        at = entries[-1].data + entries[-1].size
        if at > directory:
            raise BundleError(f"{packed}: {info.orig_filename[:100]!a} reaches into the directory")
    if at != directory:
        raise BundleError(f"{packed}: its entries end at byte {at}, its directory begins at {directory}")
    twice = repeated_name(entry.name.lower() for entry in entries)
    if twice:
        raise BundleError(f"{packed}: {twice!r} appears twice")
    return entries


def _entry(stream: IO[bytes], packed: Path, info: zipfile.ZipInfo) -> Entry:
    """A directory entry, checked against its local header."""
    shown = ascii(info.orig_filename[:100])
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~_UTF8_NAME:
        raise BundleError(f"{packed}: {shown} is compressed or encrypted; a packed bundle stores its files as they are")
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.orig_filename.endswith("/"):
        raise BundleError(f"{packed}: {shown} is a link or a folder, not a plain file")
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8_NAME else "cp437")
    stream.seek(info.header_offset)
    head = stream.read(_LOCAL.size)
    local = _LOCAL.unpack(head) if len(head) == _LOCAL.size else (b"",) * 11
    same = local[0] == b"PK\x03\x04" and local[2:4] == (info.flag_bits, zipfile.ZIP_STORED) and local[9] == len(name)
    extra = b""
    if same:
        same = stream.read(local[9]) == name
        extra = stream.read(local[10])
        sizes = local[7:9]
        if sizes == (_FULL32, _FULL32) and len(extra) >= _ZIP64.size:
            kind, _, *wide = _ZIP64.unpack(extra[-_ZIP64.size :])  # behind the padding
            sizes = tuple(wide) if kind == _ZIP64_ID else sizes
        same = same and sizes == (info.file_size, info.compress_size)
    if not same or info.file_size != info.compress_size or info.file_size > MAX_FILE_BYTES or info.comment:
        raise BundleError(f"{packed}: {shown} is described in two ways: its name or size differ")
    data = info.header_offset + _LOCAL.size + len(name) + len(extra)
    return Entry(info.orig_filename, info.file_size, data)
