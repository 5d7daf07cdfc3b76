"""Bundles as one file: an uncompressed zip whose entries begin at multiples of 4096 bytes, the manifest first.

Any unzip program opens a ``.ssb``; here it is read with a parser of its own that takes one spelling of the format only:
stored entries, back to back from the first byte to the central directory, nothing before, between or after. So entries
cannot overlap, be larger than they say, or look otherwise to another program. The alignment lets a reader map weights
without unpacking.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ssdevice.bundle.folder import OWN_FILES, PACKED_SUFFIX, Bundle, check_listing, check_out
from ssdevice.bundle.integrity import MANIFEST_FILE, MAX_MANIFEST_BYTES, SIGNATURE_FILE, repeated_name, stream_sha256
from ssdevice.bundle.manifest import MAX_FILE_BYTES, MAX_FILES, Manifest, parse_manifest
from ssdevice.bundle.signature import MAX_SIGNATURE_BYTES, verify_signature
from ssdevice.bundle.staging import Stage, disk_errors
from ssdevice.errors import BundleError, InputError

ALIGNMENT = 4096
ZIP64_FROM = 1 << 30
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_PADDING = struct.Struct("<3H")
_PADDING_ID, _ZIP64_ID = 0xD935, 1
_UTF8_NAME = 0x800
_MAX_DIRECTORY = MAX_FILES * 512
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class Entry:
    """A stored file: where its local header and its ``size`` bytes of data begin in the archive."""

    name: str
    size: int
    header: int
    data: int


def pack(bundle: Bundle, out: str | Path) -> Path:
    """Write a bundle to one file, ``NAME.ssb``; the hashes are checked on the way.

    Raises InputError if ``out`` exists or has another suffix, BundleError if a file is not what the manifest says.
    """
    out = Path(out)
    if out.suffix != PACKED_SUFFIX:
        raise InputError(f"{out}: a packed bundle is named *{PACKED_SUFFIX}")
    own = [name for name in OWN_FILES if (bundle.folder / name).is_file()]
    with disk_errors(out):
        stage = Stage(out, folder=False)
        try:
            with stage.path.open("wb") as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as archive:
                for name in (*own, *bundle.manifest.files):
                    digest = _append(archive, raw, name, bundle.folder / name)
                    if name not in own and digest != bundle.manifest.files[name].sha256:
                        raise BundleError(
                            f"{bundle.folder / name} is damaged: its sha256 is not the one in the manifest"
                        )
            read_packed_manifest(stage.path)
            stage.publish(replace=False)
        finally:
            stage.close()
    return out


def _append(archive: zipfile.ZipFile, raw: IO[bytes], name: str, file: Path) -> str | None:
    with file.open("rb", buffering=0) as source:
        info = zipfile.ZipInfo(name)  # without a date: the same bundle gives the same bytes
        info.create_system = 3
        info.external_attr = (stat.S_IFREG | 0o644) << 16
        info.file_size = os.fstat(source.fileno()).st_size
        large = info.file_size > ZIP64_FROM
        start = raw.tell() + _LOCAL.size + len(name) + (20 if large else 0) + _PADDING.size
        zeros = -start % ALIGNMENT
        info.extra = _PADDING.pack(_PADDING_ID, 2 + zeros, ALIGNMENT) + bytes(zeros)
        with archive.open(info, "w", force_zip64=large) as entry:
            digest = stream_sha256(source, info.file_size, entry)
        info.extra = b""  # the directory at the end repeats it otherwise
    return digest


def unpack(
    packed: str | Path, folder: str | Path, *, overwrite: bool = False, require_signature: Path | None = None
) -> Bundle:
    """Unpack a ``.ssb`` to a folder that appears once every byte of it has been checked.

    Raises BundleError for an archive that is damaged or not of the one form, InputError if ``folder`` exists (with
    ``overwrite``: unless it is a bundle), SSDeviceError if the disk is full.
    """
    packed, folder = Path(packed), Path(folder)
    check_out(folder, overwrite)
    with _open(packed) as stream, disk_errors(folder):
        entries = read_entries(stream, packed)
        manifest = _manifest(stream, packed, entries, require_signature)
        stage = Stage(folder, folder=True)
        try:
            for entry in entries:
                target = stage.path / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                stream.seek(entry.data)
                with target.open("wb") as to:
                    digest = stream_sha256(stream, entry.size, to)
                if entry.name not in OWN_FILES and digest != manifest.files[entry.name].sha256:
                    raise BundleError(f"{packed}: {entry.name!r} is damaged: its sha256 is not the one in the manifest")
            check_listing(stage.path, manifest)
            check_out(folder, overwrite)
            stage.publish(replace=overwrite)
        finally:
            stage.close()
    return Bundle(folder, manifest)


def read_packed_manifest(packed: str | Path) -> Manifest:
    """The manifest of a ``.ssb``, with the form of the archive checked and the contents of its files not."""
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
    """The manifest, which the entries agree with in names and sizes."""
    if not entries or entries[0].name != MANIFEST_FILE or entries[0].size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{packed}: its first entry is not a {MANIFEST_FILE} of at most {MAX_MANIFEST_BYTES} bytes")
    by_name = {entry.name: entry for entry in entries}
    signature = by_name.get(SIGNATURE_FILE)
    if signature is not None and signature.size > MAX_SIGNATURE_BYTES:
        raise BundleError(f"{packed}: {SIGNATURE_FILE} has {signature.size} bytes, at most {MAX_SIGNATURE_BYTES}")
    data = _content(stream, entries[0])
    if key is not None:
        if signature is None:
            raise BundleError(f"{packed}: no {SIGNATURE_FILE}, but a signature is required")
        verify_signature(data, _content(stream, signature), key)
    manifest = parse_manifest(data, f"{packed}: {MANIFEST_FILE}")
    for name, listed in manifest.files.items():
        if name not in by_name:
            raise BundleError(f"{packed}: {name!r} is missing")
        if by_name[name].size != listed.size:
            raise BundleError(f"{packed}: {name!r} has {by_name[name].size} bytes, {MANIFEST_FILE} says {listed.size}")
    extra = sorted(by_name.keys() - manifest.files.keys() - set(OWN_FILES))
    if extra:
        raise BundleError(f"{packed}: {extra[0][:100]!r} is not listed in {MANIFEST_FILE}")
    return manifest


def _content(stream: IO[bytes], entry: Entry) -> bytes:
    stream.seek(entry.data)
    return stream.read(entry.size)


def read_entries(stream: IO[bytes], packed: Path) -> list[Entry]:
    """The entries of a ``.ssb`` in order; raises BundleError unless they fill it exactly."""
    count, directory, size = _end(stream, packed)
    if count > MAX_FILES + len(OWN_FILES) or size > _MAX_DIRECTORY:
        raise BundleError(f"{packed}: {count} entries, at most {MAX_FILES} are allowed")
    stream.seek(directory)
    table = stream.read(size)
    entries: list[Entry] = []
    at, expected = 0, 0
    for _ in range(count):
        entry, at = _entry(stream, packed, table, at)
        if entry.header != expected:
            raise BundleError(
                f"{packed}: {entry.name!r} begins at byte {entry.header}, the one before ends at {expected}"
            )
        expected = entry.data + entry.size
        if expected > directory:
            raise BundleError(f"{packed}: {entry.name!r} says it has {entry.size} bytes, more than there are")
        entries.append(entry)
    if at != size or expected != directory:
        raise BundleError(f"{packed}: there are bytes that belong to no entry")
    twice = repeated_name(entry.name.lower() for entry in entries)
    if twice:
        raise BundleError(f"{packed}: {twice!r} stands twice")
    return entries


def _end(stream: IO[bytes], packed: Path) -> tuple[int, int, int]:
    """Entries, and where the central directory begins and how long it is: it reaches to the end records."""
    length = stream.seek(0, os.SEEK_END)
    where = length - _END.size
    head = _unpack_at(stream, packed, _END, where)
    mark, disk, disks, here, count, size, directory, comment = head
    if mark != b"PK\x05\x06" or comment or disk or disks or here != count:
        raise BundleError(f"{packed}: not a packed bundle, or cut short: no end record in its last {_END.size} bytes")
    # Records for large archives stand before it; it then repeats their values, or is full where they do not fit.
    if directory + size != where:
        short = count, size, directory
        where -= _END64_LOCATOR.size
        mark, disk, offset, disks = _unpack_at(stream, packed, _END64_LOCATOR, where)
        where -= _END64.size
        if mark != b"PK\x06\x07" or disk or disks != 1 or offset != where:
            raise BundleError(f"{packed}: its directory is not where its end record says")
        mark, _, _, _, disk, disks, here, count, size, directory = _unpack_at(stream, packed, _END64, where)
        full = min(count, _FULL16), min(size, _FULL32), min(directory, _FULL32)
        if mark != b"PK\x06\x06" or disk or disks or here != count or short != full:
            raise BundleError(f"{packed}: its zip64 end record is damaged")
    if directory + size != where:
        raise BundleError(
            f"{packed}: its directory is said to be {size} bytes at {directory}, which is not where it is"
        )
    return count, directory, size


def _entry(stream: IO[bytes], packed: Path, table: bytes, at: int) -> tuple[Entry, int]:
    """The entry whose record stands at ``at`` in the directory, checked against its local header, and the next."""
    if at + _CENTRAL.size > len(table):
        raise BundleError(f"{packed}: its directory is cut short")
    head = _CENTRAL.unpack_from(table, at)
    (mark, _, _, flags, method, _, _, _, stored, size, name_len, extra_len, comment, disk, _, mode, header) = head
    at += _CENTRAL.size
    raw_name, extra = table[at : at + name_len], table[at + name_len : at + name_len + extra_len]
    at += name_len + extra_len
    name = ascii(raw_name[:100].decode("utf-8", "replace"))
    if mark != b"PK\x01\x02" or at > len(table) or comment or disk:
        raise BundleError(f"{packed}: its directory is damaged at {name}")
    if method != zipfile.ZIP_STORED or flags & ~_UTF8_NAME:
        raise BundleError(f"{packed}: {name} is compressed or encrypted; a packed bundle stores its files as they are")
    kind = stat.S_IFMT(mode >> 16)
    if kind not in (0, stat.S_IFREG) or raw_name.endswith(b"/"):
        raise BundleError(f"{packed}: {name} is a link or a folder, not a plain file")
    stored, size, header = _zip64(packed, name, extra, stored, size, header)
    local = _unpack_at(stream, packed, _LOCAL, header)
    same = local[0] == b"PK\x03\x04" and local[2:4] == (flags, method) and local[9] == name_len
    same = same and stream.read(name_len) == raw_name
    local_extra = stream.read(local[10])
    sizes = _zip64(packed, name, local_extra, local[7], local[8])
    if not same or sizes != (stored, size) or stored != size or size > MAX_FILE_BYTES:
        raise BundleError(f"{packed}: {name} is described in two ways: its name or size differ")
    data = header + _LOCAL.size + name_len + local[10]
    return Entry(raw_name.decode("ascii", "replace"), size, header, data), at


def _zip64(packed: Path, name: str, extra: bytes, stored: int, size: int, *header: int) -> tuple[int, ...]:
    """Sizes, and the offset of the header if given, with those too large for 32 bits taken from the extra field."""
    wide = b""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64_ID:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    values = [size, stored, *header]  # the order they stand in there
    for i, value in enumerate(values):
        if value == _FULL32:
            if len(wide) < 8:
                raise BundleError(f"{packed}: {name} has no size")
            values[i], wide = int.from_bytes(wide[:8], "little"), wide[8:]
    return (values[1], values[0], *values[2:])


def _unpack_at(stream: IO[bytes], packed: Path, form: struct.Struct, at: int) -> tuple[Any, ...]:
    if not 0 <= at <= MAX_FILE_BYTES:  # what no file system can seek to, too
        raise BundleError(f"{packed}: not a packed bundle: nothing can stand at byte {at}")
    stream.seek(at)
    data = stream.read(form.size)
    if len(data) != form.size:
        raise BundleError(f"{packed}: cut short at byte {at}")
    return form.unpack(data)
