"""Packed bundles changed as archives: names, records and sizes, with the directory at the end agreeing or not."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path
from random import Random

from tests.fuzz.files import listed

NAMES = (
    "../out.bin",
    "/tmp/out.bin",
    "a\\b",
    "step.onnx",
    "MANIFEST.JSON",
    "sub/",
    "é",
    "x" * 300,
    "manifest.json",
    "",
    ".",
    "..",
)
MARKS = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"manifest.json")
NUMBERS = (0, 1, 0xFF, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 2**63 - 1, 2**64 - 1)


def pack_any(rng: Random, folder: Path, out: Path) -> str:
    """The files of a folder as a zip: in another order, compressed, with names, links or entries no bundle has."""
    plain = [path.relative_to(folder).as_posix() for path in listed(folder)]
    names = sorted(plain, key=lambda name: (name != "manifest.json", name))
    if not names:
        raise OSError("no plain file is left")
    kind = rng.choice(
        ["plain", "plain", "order", "deflate", "name", "link", "twice", "comment", "zip64", "folder", "bomb"]
    )
    if kind == "order":
        rng.shuffle(names)
    odd = rng.randrange(len(names))
    with zipfile.ZipFile(out, "w") as archive:
        for number, name in enumerate(names):
            info = zipfile.ZipInfo(rng.choice(NAMES) if kind == "name" and number == odd else name)
            info.create_system, info.external_attr = 3, (stat.S_IFREG | 0o644) << 16
            if kind in ("deflate", "bomb") and number == odd:
                info.compress_type = zipfile.ZIP_DEFLATED
            if kind == "link" and number == odd:
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
            content = (folder / name).read_bytes()
            if kind == "bomb" and number == odd:
                content = bytes(1 << 25)
            with archive.open(info, "w", force_zip64=kind == "zip64") as entry:
                entry.write(content)
            if kind == "twice" and number == odd:
                archive.writestr(info, content)
        if kind == "folder":
            archive.mkdir("sub")
        if kind == "comment":
            archive.comment = b"PK\x05\x06" + bytes(18)
    return f"zip {kind}"


def change_records(rng: Random, file: Path) -> str:
    """Put an extreme number into a record of the archive: near one of its marks, where sizes and offsets stand."""
    data = bytearray(file.read_bytes())
    mark = rng.choice(MARKS)
    found = [at for at in range(len(data)) if data.startswith(mark, at)] if mark in data else []
    at = (rng.choice(found) if found else rng.randrange(len(data))) + rng.randrange(4, 46)
    width = rng.choice([1, 2, 4, 8])
    number = rng.choice(NUMBERS) & ((1 << 8 * width) - 1)
    data[at : at + width] = number.to_bytes(width, "little")
    file.write_bytes(data)
    return f"record {mark!r} at {at}: {number:#x}"


def manifest_bytes(file: Path) -> range:
    """Where the manifest's own bytes stand, which no hash protects."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        info = archive.getinfo("manifest.json")
        stream.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    start = info.header_offset + 30 + name + extra
    return range(start, start + info.file_size)
