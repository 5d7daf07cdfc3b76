"""A packed bundle unpacks to the same bundle, or is refused before anything of it is visible."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdevice.bundle import archive
from ssdevice.bundle.archive import ALIGNMENT, pack, read_entries, read_packed_manifest, unpack
from ssdevice.bundle.folder import Bundle
from ssdevice.errors import BundleError, InputError
from tests.bundle.samples import CONTENT, write_sample

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The sample bundle as one file."""
    folder = tmp_path_factory.mktemp("packed")
    return pack(write_sample(folder / "bundle"), folder / "a.ssb").read_bytes()


@pytest.fixture
def file(packed: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "a.ssb"
    path.write_bytes(packed)
    return path


def test_unpacking_gives_the_bundle_that_was_packed(file: Path, tmp_path: Path) -> None:
    bundle = unpack(file, tmp_path / "new" / "bundle")
    opened = Bundle.open(bundle.folder)
    assert opened.manifest == bundle.manifest == read_packed_manifest(file)
    assert {name: (bundle.folder / name).read_bytes() for name in opened.manifest.files} == CONTENT
    assert pack(opened, tmp_path / "b.ssb").read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ssb", "b.ssb", "new"]


def test_any_unzip_program_reads_it_and_data_is_aligned(file: Path) -> None:
    with zipfile.ZipFile(file) as archive_file:
        assert archive_file.testzip() is None
        assert archive_file.namelist()[0] == "manifest.json"
        assert {name: archive_file.read(name) for name in archive_file.namelist()[1:]} == CONTENT
    with file.open("rb") as stream:
        entries = read_entries(stream, file)
        for entry in entries[1:]:
            assert entry.data % ALIGNMENT == 0
            stream.seek(entry.data)
            assert stream.read(entry.size) == CONTENT[entry.name]


def test_outputs_that_exist_are_kept(file: Path, tmp_path: Path) -> None:
    bundle = unpack(file, tmp_path / "bundle")
    with pytest.raises(InputError, match="exists"):
        unpack(file, tmp_path / "bundle")
    with pytest.raises(InputError, match="exists"):
        pack(bundle, file)
    with pytest.raises(InputError, match="is named \\*.ssb"):
        pack(bundle, tmp_path / "a.zip")
    assert unpack(file, tmp_path / "bundle", overwrite=True).manifest == bundle.manifest


def test_a_damaged_bundle_is_not_packed(file: Path, tmp_path: Path) -> None:
    bundle = unpack(file, tmp_path / "bundle")
    (bundle.folder / "model.onnx").write_bytes(b"A graph")
    with pytest.raises(BundleError, match="model.onnx is damaged"):
        pack(bundle, tmp_path / "b.ssb")
    assert not (tmp_path / "b.ssb").exists() and not list(tmp_path.glob(".*"))


def test_sizes_beyond_32_bits_are_read_from_zip64_fields(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "ZIP64_FROM", 1)  # as for files of gigabytes: wide sizes in the local header
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # and in the directory and at the end
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
    bundle = unpack(file, tmp_path / "bundle")
    wide = pack(bundle, tmp_path / "wide.ssb")
    assert b"PK\x06\x06" in wide.read_bytes()[-200:]
    with wide.open("rb") as stream:
        assert all(entry.data % ALIGNMENT == 0 for entry in read_entries(stream, wide))
    assert unpack(wide, tmp_path / "again").manifest == bundle.manifest


def rezip(packed: bytes, change: Callable[[zipfile.ZipInfo, bytes], list[tuple[zipfile.ZipInfo, bytes]]]) -> bytes:
    """The archive written again by another program, with its entries changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            plain = zipfile.ZipInfo(info.filename)
            plain.external_attr = info.external_attr
            for entry, data in change(plain, old.read(info)):
                new.writestr(entry, data)
    return out.getvalue()


def with_entry(name: str, data: bytes = b"", mode: int = stat.S_IFREG | 0o644) -> Change:
    """One more entry before the last."""
    extra = zipfile.ZipInfo(name)
    extra.external_attr = mode << 16

    def change(info: zipfile.ZipInfo, old: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
        return [(extra, data), (info, old)] if info.filename == "tokenizer.json" else [(info, old)]

    return lambda packed: rezip(packed, change)


def compressed(packed: bytes) -> bytes:
    def change(info: zipfile.ZipInfo, old: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
        info.compress_type = zipfile.ZIP_DEFLATED if info.filename == "tokenizer.json" else zipfile.ZIP_STORED
        return [(info, old)]

    return rezip(packed, change)


def linked(packed: bytes) -> bytes:
    def change(info: zipfile.ZipInfo, old: bytes) -> list[tuple[zipfile.ZipInfo, bytes]]:
        info.external_attr = (stat.S_IFLNK | 0o777) << 16 if info.filename == "tokenizer.json" else 0
        return [(info, old)]

    return rezip(packed, change)


def without(name: str) -> Change:
    return lambda packed: rezip(packed, lambda info, old: [] if info.filename == name else [(info, old)])


def in_directory(field: int, value: int, name: bytes = b"model.onnx", form: str = "<L") -> Change:
    """A value in the record that the directory has of an entry."""

    def change(packed: bytes) -> bytes:
        at = packed.rindex(b"PK\x01\x02", 0, packed.rindex(name + b"PK")) + field
        return packed[:at] + struct.pack(form, value) + packed[at + struct.calcsize(form) :]

    return change


def first_entry_elsewhere(packed: bytes) -> bytes:
    """The directory's first record points at the second entry: entries overlap."""
    first = packed.index(b"PK\x01\x02") + 42
    second = packed.index(b"PK\x01\x02", first) + 42
    return packed[:first] + packed[second : second + 4] + packed[first + 4 :]


def in_content(packed: bytes) -> bytes:
    at = packed.index(b"a graph")
    return packed[:at] + b"b" + packed[at + 1 :]


CHANGES: dict[str, tuple[Change, str]] = {
    "flipped content": (in_content, "'model.onnx' is damaged: its sha256"),
    "compressed": (compressed, "'tokenizer.json' is compressed or encrypted"),
    "encrypted": (in_directory(8, 1, form="<H"), "'model.onnx' is compressed or encrypted"),
    "link": (linked, "'tokenizer.json' is a link or a folder"),
    "folder": (with_entry("adapters/", mode=stat.S_IFDIR | 0o755), "'adapters/' is a link or a folder"),
    "unlisted": (with_entry("run.sh", b"#!"), "'run.sh' is not listed in manifest.json"),
    "climbing": (with_entry("../../etc/cron.d/x", b"#!"), "'../../etc/cron.d/x' is not listed"),
    "absolute": (with_entry("/etc/passwd", b"#!"), "'/etc/passwd' is not listed"),
    "twice": (with_entry("model.onnx", b"a graph"), "'model.onnx' appears twice"),
    "twice by case": (with_entry("MODEL.onnx", b"a graph"), "'model.onnx' appears twice"),
    "missing": (without("model.onnx"), "'model.onnx' is missing"),
    "no manifest": (without("manifest.json"), "its first entry is not a manifest.json"),
    "larger": (in_directory(24, 1 << 20), "is described in two ways"),
    "without end": (in_directory(20, 0xFFFFFFFF), "is described in two ways"),
    "elsewhere": (in_directory(42, 7), "begins at byte 7"),
    "far away": (in_directory(42, 1 << 31), "begins at byte 2147483648"),
    "overlapping": (first_entry_elsewhere, "'manifest.json' begins at byte"),
    "before": (lambda packed: b"#!/bin/sh\n" + packed, "'manifest.json' begins at byte 10"),
    "after": (lambda packed: packed + b"\0", "no end record"),
    "comment": (lambda packed: packed[:-2] + b"\x05\0hello", "no end record"),
    "empty": (lambda packed: b"", "not a packed bundle"),
    "nothing": (lambda packed: b"PK\x05\x06" + bytes(18), "its first entry is not a manifest.json"),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", CHANGES)
def test_an_archive_of_another_form_is_refused(packed: bytes, tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    changed = change(packed)
    assert changed != packed
    (tmp_path / "a.ssb").write_bytes(changed)
    with pytest.raises(BundleError) as caught:
        unpack(tmp_path / "a.ssb", tmp_path / "bundle")
    assert message in str(caught.value) and str(caught.value).isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["a.ssb"]


def test_two_entries_that_share_bytes_are_refused(packed: bytes, tmp_path: Path) -> None:
    first = packed.index(b"PK\x01\x02")
    second = packed.index(b"PK\x01\x02", first + 4)
    record = packed[first:second]
    end = struct.unpack("<4s4H2LH", packed[-22:])
    tail = struct.pack("<4s4H2LH", end[0], 0, 0, end[3] + 1, end[4] + 1, end[5] + len(record), end[6], 0)
    (tmp_path / "a.ssb").write_bytes(packed[:second] + record + packed[second:-22] + tail)
    with pytest.raises(BundleError, match="'manifest.json' begins at byte 0, the one before ends at"):
        unpack(tmp_path / "a.ssb", tmp_path / "bundle")


@settings(max_examples=150)
@given(data=st.data())
def test_no_change_of_bytes_gives_another_bundle(
    packed: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    structure = st.integers(packed.rindex(b"PK\x01\x02", 0, len(packed) - 200) - 400, len(packed) - 1)
    at = data.draw(st.one_of(structure, st.integers(0, len(packed) - 1)))
    put = data.draw(st.binary(min_size=1, max_size=4))
    changed = packed[:at] + put + packed[at + data.draw(st.sampled_from([len(put), 0, 1, 30])) :]
    (folder / "a.ssb").write_bytes(changed)
    try:
        bundle = unpack(folder / "a.ssb", folder / "bundle")
    except BundleError as error:
        assert str(error).isprintable()
        assert [path.name for path in folder.iterdir()] == ["a.ssb"]
    else:
        assert {name: (bundle.folder / name).read_bytes() for name in bundle.manifest.files} == CONTENT
