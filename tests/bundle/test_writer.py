"""A bundle is written whole or not at all: whatever interrupts the writer, the old or the new one
is there.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.errors import BundleError, ConfigError, InputError, SSDeviceError
from tests.bundle.samples import CONTENT, FOLDER, edit_manifest, fill, sample_manifest, write_sample
from tests.runtime.tiny_bundle import tiny_bundle


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_writing_gives_an_open_bundle_and_leaves_nothing_else(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "new" / "bundle")
    assert bundle.manifest == Bundle.open(tmp_path / "new" / "bundle").manifest
    assert names(tmp_path / "new") == ["bundle"]


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    one = write_sample(tmp_path / "one")
    two = write_sample(tmp_path / "two")
    assert one.file("model").read_bytes() == two.file("model").read_bytes()
    assert (one.folder / "manifest.json").read_bytes() == (
        two.folder / "manifest.json"
    ).read_bytes()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError, SystemExit, SSDeviceError])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, stop: type[BaseException]) -> None:
    with pytest.raises(stop), BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        raise stop("now")
    assert names(tmp_path) == []


def test_a_writer_that_does_not_commit_leaves_nothing(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
    assert names(tmp_path) == []
    with pytest.raises(SSDeviceError, match="outside its with block"):
        writer.add_file("late", b"")


def test_an_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "bundle").folder
    with pytest.raises(
        InputError, match="exists; choose another folder, or replace the bundle with --overwrite"
    ):
        BundleWriter(out)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(InputError, match="symbolic link"):
        BundleWriter(tmp_path / "link", overwrite=True)


def test_an_output_made_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    other = write_sample(tmp_path / "other", note="the other")
    with pytest.raises(InputError, match="exists"), BundleWriter(out) as writer:
        fill(writer)
        other.folder.rename(out)
        writer.commit(sample_manifest())
    assert Bundle.open(out).manifest.notes == ("the other",)
    assert names(tmp_path) == ["bundle"]


def test_overwriting_replaces_a_bundle_even_a_damaged_one(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "bundle", note="old").folder
    edit_manifest(out, {"target": "tpu", "schema_version": 7})
    (out / "model.onnx").unlink()
    write_sample(out, overwrite=True, note="new")
    assert Bundle.open(out).manifest.notes == ("new",)
    (tmp_path / "empty").mkdir()
    write_sample(tmp_path / "empty", overwrite=True)
    assert names(tmp_path) == ["bundle", "empty"]


def test_overwriting_deletes_nothing_but_a_bundle(tmp_path: Path) -> None:
    bundle = write_sample(tmp_path / "bundle").folder
    (bundle / "thesis.txt").write_text("three years")
    model = tmp_path / "model"
    page = tmp_path / "page"
    file = tmp_path / "file"
    for folder, content in ((model, {}), (page, {"schema_version": 1, "name": "a web page"})):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if content:
            (folder / "manifest.json").write_text(json.dumps(content))
    file.write_text("text")
    for out, why in (
        (bundle, "'thesis.txt' is in it, which is not part of a bundle"),
        (model, "it is not a bundle"),
        (page, "its manifest.json is not that of a bundle"),
        (file, "it is not a folder"),
    ):
        with pytest.raises(InputError, match=f"is not overwritten: .*{why}"):
            BundleWriter(out, overwrite=True)
    assert (bundle / "thesis.txt").exists() and (model / "config.json").exists() and file.exists()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(
            SSDeviceError,
            match="the disk is full: .*bundle could not be written; now free: \\d+ MiB in",
        ),
        BundleWriter(tmp_path / "bundle") as writer,
    ):
        full()
    monkeypatch.setattr("shutil.copyfile", full)
    with (
        pytest.raises(SSDeviceError, match="the disk is full"),
        BundleWriter(tmp_path / "bundle") as writer,
    ):
        writer.add_file("model.onnx", Path(__file__))
    assert names(tmp_path) == []


LIMITED = """
import resource, sys
from pathlib import Path
from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.staging import disk_errors, write_json
from ssdevice.commands.web import write
from ssdevice.errors import InputError
from ssdevice.runtime.session import Session

bundle = Bundle.open(sys.argv[1])
with Session.open(bundle) as session:
    list(session.generate("hello", max_tokens=4))
    session.save("old.cache")
    old = Path("old.cache").read_bytes()
    large = Path("large.bin")
    large.write_bytes(bytes(9000))

    def bundled(content):
        with BundleWriter("new.bundle") as writer:
            writer.add_file("a.bin", content)

    def library(out):  # as safetensors says it
        with disk_errors(out):
            raise RuntimeError("I/O error: File too large (os error 27)")

    writers = {
        "saved": lambda: session.save("old.cache"),
        "new": lambda: session.save("new.cache"),
        "json": lambda: write_json(Path("new.json"), ["x" * 9000]),
        "bytes": lambda: bundled(bytes(9000)),
        "copied": lambda: bundled(large),
        "site": lambda: write({"large.bin": large}, Path("new.site")),
        "library": lambda: library(Path("new.lib")),
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for name, write_it in writers.items():
        try:
            write_it()
        except InputError as error:
            print(name, error, flush=True)
    assert Path("old.cache").read_bytes() == old
"""


WRITERS = ("saved", "new", "json", "bytes", "copied", "site", "library")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of Unix")
def test_a_file_beyond_a_limit_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tiny_bundle().folder)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in said] == [*WRITERS]
    for name, message in said:
        assert "could not be written: File too large for a limit of this process" in message, name
    assert names(tmp_path) == ["large.bin", "old.cache"]


def test_what_was_written_is_listed_and_roles_and_apps_have_their_files(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        path = writer.path_for("late/one.bin", "late")
        with pytest.raises(ConfigError, match="'late/one.bin' is not in files"):
            writer.commit(sample_manifest())
        path.write_bytes(b"1")
        for name, role in (("../up", None), ("/abs", None), ("ok", "No Role"), ("other", "model")):
            with pytest.raises(ConfigError):
                writer.path_for(name, role)
        (writer.folder / "manifest.json").write_bytes(b"{}")
        with pytest.raises(ConfigError, match="'manifest.json' may not be listed"):
            writer.commit(sample_manifest())
        (writer.folder / "manifest.json").unlink()
        (writer.folder / "link").symlink_to("/etc/passwd")
        with pytest.raises(BundleError, match="symbolic link"):
            writer.commit(sample_manifest())
        (writer.folder / "link").unlink()
        with pytest.raises(ConfigError, match="'b' is not in files"):
            writer.commit(
                replace(sample_manifest(), apps=(replace(sample_manifest().apps[1], files=("b",)),))
            )
        assert writer.commit(sample_manifest()).file("late").read_bytes() == b"1"


def test_a_manifest_that_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    for parity in (float("nan"), float("inf"), complex(1, 2)):
        with (
            pytest.raises(SSDeviceError, match="a value that JSON cannot hold"),
            BundleWriter(tmp_path / "b") as writer,
        ):
            fill(writer)
            writer.commit(replace(sample_manifest(), parity={"logits": parity}))
    assert names(tmp_path) == []


def test_a_bundle_is_written_from_another(tmp_path: Path) -> None:
    old = write_sample(tmp_path / "bundle", note="old")
    app = sample_manifest().apps[1]
    manifest = replace(
        sample_manifest("new"), apps=(replace(app, folder=None, files=("sql.bin",)),)
    )
    with BundleWriter(old.folder, overwrite=True) as writer:
        writer.add_bundle(old, without=frozenset(["adapters/sql/weights.bin"]))
        writer.add_file("sql.bin", b"next", "adapter:sql")
        writer.add_file("assets", old.file(FOLDER), "assets")
        writer.commit(manifest)
    new = Bundle.open(old.folder)
    assert new.file("adapter:sql").read_bytes() == b"next" and new.file("package").is_dir()
    assert (new.file("assets") / "Manifest.json").read_bytes() == CONTENT[
        "model.mlpackage/Manifest.json"
    ]
    assert "adapters/sql/weights.bin" not in new.manifest.files


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path,
) -> None:
    out = tmp_path / "bundle"
    (tmp_path / ".bundle.ssdevice.tmp").mkdir()
    (tmp_path / ".bundle.ssdevice.tmp" / "model.onnx").write_bytes(b"half")
    (tmp_path / ".other.ssdevice.tmp").mkdir()
    with BundleWriter(out) as first:
        fill(first)
        with pytest.raises(InputError, match="another process is writing"), BundleWriter(out):
            pass
        assert len(names(tmp_path)) == 2
        first.commit(sample_manifest("first"))
    assert names(tmp_path) == [".other.ssdevice.tmp", "bundle"]


def test_what_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".bundle.ssdevice.tmp").mkdir()
    monkeypatch.setattr("ssdevice.bundle.staging._remove", lambda path: None)
    with pytest.raises(InputError, match=r"\.bundle\.ssdevice\.tmp was left .* remove it"):
        BundleWriter(tmp_path / "bundle")


CRASHES = '''
import os, signal, sys
from pathlib import Path
from ssdevice.bundle import staging
from ssdevice.bundle.folder import Bundle
from tests.bundle.samples import write_sample

out = Path(sys.argv[1])
EVENTS = ("open", "os.", "shutil.")
os.fsync = lambda handle: None  # a killed process loses nothing that it wrote

def write(number, stop):
    """Write version ``number`` and die at the stop-th event of the file system."""
    seen = 0
    def count(event, args):
        nonlocal seen
        if event.startswith(EVENTS):
            seen += 1
            if seen == stop:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    write_sample(out, overwrite=True, note=str(number))

write_sample(out, note="0")
version, stop, gaps, old, new = 0, 0, 0, 0, 0
while True:
    stop += 1
    child = os.fork()
    if child == 0:
        write(version + 1, stop)
        os._exit(0)
    killed = os.waitpid(child, 0)[1] != 0
    gaps += not out.exists()
    staging.Stage(out, folder=True).close()
    found = int(Bundle.open(out).manifest.notes[0])
    assert found in (version, version + 1), (found, version, stop)
    old, new = old + (found == version), new + (found != version)
    version = found
    if not killed:
        break
write_sample(out, overwrite=True, note="last")
assert os.listdir(out.parent) == [out.name], os.listdir(out.parent)
print(stop, gaps, old, new)
'''


@pytest.mark.skipif(
    not hasattr(os, "fork") or sys.platform == "darwin", reason="counts events of Linux"
)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new_bundle(
    tmp_path: Path, repository: Path
) -> None:
    run = [sys.executable, "-c", CRASHES, str(tmp_path / "bundles" / "bundle")]
    done = subprocess.run(run, cwd=repository, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    stops, gaps, old, new = map(int, done.stdout.split())
    assert stops > 50 and old > 20 and new > 1, "the sweep met too few points of the write"
    assert gaps == 1  # the one instant between two renames; the next writer closes it
