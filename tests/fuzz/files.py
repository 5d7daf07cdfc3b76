"""Folders changed as a disk, a download or an enemy would: bytes, lengths, names, links, things
that are no files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

ODD_NAMES = (
    "extra.bin",
    "step.onnx.bak",
    "é.bin",
    "a\nb",
    ".hidden",
    "Manifest.json",
    "weights.bin ",
    "sub/x.bin",
    "x" * 200,
)


def listed(folder: Path) -> list[Path]:
    """Plain files of a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def flip(rng: Random, file: Path) -> str:
    """Change 1 to 16 bytes, or a run of them."""
    data = bytearray(file.read_bytes())
    if not data:
        return "nothing to flip"
    at = [rng.randrange(len(data)) for _ in range(rng.choice([1, 1, 2, 16]))]
    if rng.random() < 0.2:
        at = list(range(at[0], min(at[0] + rng.choice([4, 64, 4096]), len(data))))
    value = rng.choice([None, 0, 0xFF, 0x7F, 0x80, 0x20, 0x22, 0x7B])
    for index in at:
        data[index] = data[index] ^ (1 << rng.randrange(8)) if value is None else value
    file.write_bytes(data)
    return f"flip {len(at)} from {at[0]} in {file.name}"


def truncate(rng: Random, file: Path) -> str:
    """Cut the file: anywhere, by one byte, or to nothing."""
    size = file.stat().st_size
    to = rng.choice([0, max(size - 1, 0), size // 2, rng.randint(0, size)])
    with file.open("r+b") as stream:
        stream.truncate(to)
    return f"truncate {file.name} to {to} of {size}"


def extend(rng: Random, file: Path) -> str:
    """Add bytes, or a hole of up to 64 MB that takes no room on the disk."""
    with file.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        if rng.random() < 0.2:
            stream.truncate(size + rng.choice([1 << 20, 1 << 26]))
        else:
            stream.write(rng.randbytes(rng.choice([1, 7, 4096])))
    return f"extend {file.name}"


def splice(rng: Random, file: Path) -> str:
    """Remove, repeat or move a piece of the file."""
    data = file.read_bytes()
    a, b = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    b = min(b, a + rng.choice([1, 8, 100, 10_000]))
    whole = {
        "remove": data[:a] + data[b:],
        "repeat": data[:b] + data[a:],
        "move": data[b:] + data[:b],
    }
    kind = rng.choice(list(whole))
    file.write_bytes(whole[kind])
    return f"{kind} {b - a} of {file.name}"


def extreme_floats(rng: Random, file: Path) -> str:
    """NaN, infinities and huge numbers in the place of a file's floats."""
    data = bytearray(file.read_bytes())
    word = rng.choice(
        [
            b"\x00\x00\xc0\x7f",
            b"\x00\x00\x80\x7f",
            b"\x00\x00\x80\xff",
            b"\xff\xff\x7f\x7f",
            b"\x00\x7c\x00\x7c",
        ]
    )
    start = rng.randrange(max(len(data) // 4, 1)) * 4
    count = rng.choice([1, 64, len(data) // 4])
    for at in range(start, min(start + 4 * count, len(data) - 3), 4):
        data[at : at + 4] = word
    file.write_bytes(data)
    return f"{word.hex()} x {count} in {file.name}"


def swap(rng: Random, folder: Path) -> str:
    """Exchange the contents of two files."""
    one, other = rng.sample(listed(folder), 2)
    first = one.read_bytes()
    second = other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"swap {one.name} and {other.name}"


def overwrite(rng: Random, folder: Path) -> str:
    """Put one file's content in another's place."""
    one, other = rng.sample(listed(folder), 2)
    other.write_bytes(one.read_bytes())
    return f"{one.name} over {other.name}"


def remove(rng: Random, folder: Path) -> str:
    """Remove a file."""
    file = rng.choice(listed(folder))
    file.unlink()
    return f"remove {file.name}"


def rename(rng: Random, folder: Path) -> str:
    """Give a file another name."""
    file = rng.choice(listed(folder))
    name = rng.choice([file.name.upper(), file.name + "x", *ODD_NAMES])
    (folder / name).parent.mkdir(exist_ok=True)
    file.rename(folder / name)
    return f"rename {file.name} to {name[:20]!r}"


def add(rng: Random, folder: Path) -> str:
    """A file too many."""
    name = rng.choice(ODD_NAMES)
    (folder / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(rng.choice(listed(folder)), folder / name)
    return f"add {name[:20]!r}"


def replace(rng: Random, folder: Path) -> str:
    """Something that is not a plain file in the place of one: links, a folder, a pipe, a device."""
    file = rng.choice(listed(folder))
    content = file.read_bytes()
    file.unlink()
    kind = rng.choice(
        ["outside", "absolute", "inside", "dangling", "circle", "folder", "pipe", "proc"]
    )
    if kind == "outside":
        (folder.parent / "outside").write_bytes(content)
        file.symlink_to("../outside")
    elif kind == "absolute":
        file.symlink_to("/dev/zero")
    elif kind == "inside":
        file.symlink_to(rng.choice(listed(folder)).name)
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "circle":
        file.symlink_to(file.name)
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/proc/self/environ")
    return f"{file.name} is {kind}"


def links(rng: Random, folder: Path) -> str:
    """A folder that leads out, up, or far down."""
    kind = rng.choice(["up", "root", "deep"])
    if kind == "deep":
        (folder / "/".join(["d"] * rng.choice([10, 60]))).mkdir(parents=True)
    else:
        (folder / "sub").symlink_to(".." if kind == "up" else "/")
    return f"a folder: {kind}"


Change = Callable[[Random, Path], str]
CONTENT: tuple[Change, ...] = (flip, flip, truncate, extend, splice)
FOLDER: tuple[Change, ...] = (swap, overwrite, remove, rename, add, replace, links)
