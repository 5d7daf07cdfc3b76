"""Bundles: folders that are checked before anything in them is used, and written whole or not at
all.

A bundle is a manifest and the files it lists. The reader assumes that someone hostile made the
folder. It does not guard against changes while the bundle is in use, so keep it where only its user
can write.
"""

import dataclasses
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Self

from ssdevice import arguments
from ssdevice.bundle import integrity
from ssdevice.bundle.integrity import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    file_sha256,
    list_files,
    manifest_bytes,
)
from ssdevice.bundle.manifest import (
    MAX_FILES,
    ROLE,
    App,
    FileEntry,
    Manifest,
    encode_manifest,
    parse_manifest,
)
from ssdevice.bundle.staging import Stage, check_writable, disk_errors
from ssdevice.contract import FunctionSpec, Geometry
from ssdevice.errors import BundleError, ConfigError, InputError, SSDeviceError
from ssdevice.rules import check_rule

OWN_FILES = (MANIFEST_FILE, SIGNATURE_FILE)


@dataclasses.dataclass(eq=False)
class Bundle:
    """A checked bundle."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(
        cls, path: str | Path, *, verify: bool = True, require_signature: Path | None = None
    ) -> Self:
        """The bundle in a folder, after checking its manifest, names, sizes and hashes.

        ``verify=False`` skips only the hashes, for a restart on files that were checked before:
        hashing took 20 ms per 10 MB on a core with SHA instructions and 60 ms without.
        ``require_signature``: an ed25519 public key (PEM file) that must have signed the manifest;
        implies ``verify``. Raises BundleError, which names the file and the field.
        """
        folder = arguments.path("a bundle", path)
        _check_folder(folder)
        data = manifest_bytes(folder)
        if require_signature is not None:
            integrity.verify_signature(folder, data, require_signature)
        manifest = parse_manifest(data, str(folder / MANIFEST_FILE))
        _check_sizes(folder, manifest.files)
        if verify or require_signature is not None:
            for name, entry in manifest.files.items():
                if file_sha256(folder / name, entry.size) != entry.sha256:
                    raise BundleError(
                        f"{folder / name} is damaged: its sha256 is not the one in {MANIFEST_FILE}"
                    )
        return cls(folder, manifest)

    @property
    def geometry(self) -> Geometry:
        return self.manifest.geometry

    @cached_property
    def functions(self) -> Mapping[str, FunctionSpec]:
        return {spec.name: spec for spec in self.manifest.functions}

    def file(self, name: str) -> Path:
        """The file or folder with this role, or at this path in the bundle.

        Raises BundleError if there is none.
        """
        path = self.manifest.roles.get(name, name)
        files = self.manifest.files
        if path in files or any(known.startswith(f"{path}/") for known in files):
            return self.folder / path
        roles = ", ".join(sorted(self.manifest.roles))
        raise BundleError(f"{self.folder} has no file {name!r}; its roles are {roles}")

    def app(self, name: str | None = None) -> App:
        """The app with this name, or the default app.

        Raises InputError, which lists the apps, if there is none.
        """
        wanted = self.manifest.default_app if name is None else name
        for app in self.manifest.apps:
            if app.name == wanted:
                return app
        names = ", ".join(app.name for app in self.manifest.apps)
        raise InputError(f"{self.folder} has no app {wanted!r}; it has {names}")

    def check_base(self, name: str, sha256: str) -> None:
        """Raise InputError unless the model ``name``, whose weights have this ``sha256``, is the
        bundle's base.
        """
        base = self.manifest.model.sha256
        if sha256 != base:
            raise InputError(
                f"{name} is not the base of {self.folder}: its weights have sha256 "
                f"{sha256[:12]}.., the bundle's base {base[:12]}.."
            )

    def function_names(self, app: str | None = None) -> Mapping[str, str]:
        """The contract's functions that an app has -> the target's names of them."""
        return self.app(app).functions or {name: name for name in self.functions}


def _check_folder(folder: Path) -> None:
    """Raise BundleError for a path that cannot be a bundle's."""
    if folder.is_file():
        raise BundleError(
            f"{folder} is a file, a bundle is a folder; unpack it first if it is an archive"
        )
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such bundle")
    file = folder / MANIFEST_FILE
    if not file.exists() and not file.is_symlink():
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST_FILE}")


def _check_sizes(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise BundleError unless a folder has exactly these files, of these sizes."""
    found = list_files(folder, MAX_FILES)
    for name, entry in files.items():
        if name not in found:
            raise BundleError(f"{folder}: {name!r} is missing")
        if found[name] != entry.size:
            raise BundleError(
                f"{folder}: {name!r} has {found[name]} bytes, {MANIFEST_FILE} says {entry.size}"
            )
    for name in sorted(found.keys() - files.keys() - set(OWN_FILES)):
        raise BundleError(f"{folder}: {name[:200]!r} is not listed in {MANIFEST_FILE}; remove it")


class BundleWriter:
    """Writes a bundle under a temporary name and renames it at the end::

        with BundleWriter(out) as writer:
            save(writer.path_for("model.onnx", "model"))
            writer.add_file("tokenizer.json", data, "tokenizer")
            bundle = writer.commit(manifest)

    If the block ends before ``commit``, nothing is left behind. What a killed process left is
    removed by the next writer of the same name. See ``Stage.publish`` for what is visible when.
    Raises InputError if ``out`` exists, unless ``overwrite`` is set and it is a bundle or an empty
    folder; SSDeviceError if the disk is full.
    """

    def __init__(self, out: str | Path, *, overwrite: bool = False) -> None:
        self.out = Path(out)
        self.overwrite = overwrite
        check_out(self.out, overwrite)
        with disk_errors(self.out):
            self._stage = Stage(self.out, folder=True)
        self.folder = self._stage.path
        """The temporary folder; every file in it belongs to the bundle."""
        self._roles: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stage.close()
        if isinstance(error, Exception):
            with disk_errors(self.out):
                raise error

    def declare(self, name: str, role: str) -> None:
        """Give a file or folder of the bundle a role. Raises ConfigError."""
        check_rule("a role", role, ROLE)
        if self._roles.setdefault(role, name) != name:
            raise ConfigError(f"role {role!r} is given to {self._roles[role]} and to {name}")

    def path_for(self, name: str, role: str | None = None) -> Path:
        """The path to write a file or folder to, with a role or without; the parent exists.

        Raises ConfigError.
        """
        if not self.folder.is_dir():
            raise SSDeviceError("a BundleWriter was used outside its with block")
        check_rule("a bundle's file", name, integrity.PATH)
        if role is not None:
            self.declare(name, role)
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add_file(self, name: str, content: bytes | Path, role: str | None = None) -> None:
        """Put bytes, or a copy of a file or folder, into the bundle."""
        path = self.path_for(name, role)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content.is_dir():
            shutil.copytree(
                content, path, symlinks=True, dirs_exist_ok=True, copy_function=shutil.copyfile
            )
        else:
            shutil.copyfile(content, path)

    def add_bundle(self, bundle: Bundle, *, without: frozenset[str] = frozenset()) -> None:
        """Put the files of another bundle, but for the paths in ``without``, into this one, with
        their roles.

        Raises InputError if its manifest has changed since it was opened: another process may have
        rewritten it.
        """
        if parse_manifest(manifest_bytes(bundle.folder), MANIFEST_FILE) != bundle.manifest:
            raise InputError(f"{bundle.folder} was changed by another process meanwhile; try again")
        for name in bundle.manifest.files:
            if name not in without:
                self.add_file(name, bundle.folder / name)
        for role, name in bundle.manifest.roles.items():
            if (self.folder / name).exists():  # a folder goes with the last of its files
                self.declare(name, role)

    def commit(self, manifest: Manifest) -> Bundle:
        """List and hash what was written into ``manifest``, and make the bundle visible.

        Raises ConfigError if roles or apps refer to a file that was not written.
        """
        found = list_files(self.folder, MAX_FILES)
        files = {
            path: FileEntry(size, file_sha256(self.folder / path, size) or "")
            for path, size in found.items()
        }
        roles = dict(sorted(self._roles.items()))
        manifest = dataclasses.replace(manifest, files=dict(sorted(files.items())), roles=roles)
        manifest.check_files()
        data = encode_manifest(manifest)
        if parse_manifest(data, MANIFEST_FILE) != manifest:
            raise SSDeviceError(f"{MANIFEST_FILE} does not read back as it was written")
        (self.folder / MANIFEST_FILE).write_bytes(data)
        check_out(self.out, self.overwrite)
        self._stage.publish(replace=self.overwrite)
        return Bundle(self.out, manifest)


def check_out(out: Path, overwrite: bool | None) -> None:
    """Raise InputError unless a bundle may be written to ``out``: only a bundle is ever
    overwritten.

    ``overwrite`` None: the caller has no option that allows it.
    """
    if out.is_symlink():
        raise InputError(f"{out} is a symbolic link; give the folder itself")
    check_writable(out.parent if out.exists() else out)
    if not out.exists():
        return
    if overwrite is None:
        raise InputError(f"{out} exists; choose another folder")
    if not overwrite:
        raise InputError(
            f"{out} exists; choose another folder, or replace the bundle with --overwrite"
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    _check_is_bundle(out)


def check_outside(bundle: Path, out: Path) -> None:
    """Raise InputError if ``out`` is in the folder of a bundle, which may hold nothing that it does
    not list.
    """
    if out.resolve().is_relative_to(bundle.resolve()):
        raise InputError(f"{out} is inside the bundle {bundle}; choose another place")


def _check_is_bundle(out: Path) -> None:
    """Raise InputError unless ``out`` is a bundle, which may be overwritten.

    Not by ``Bundle.open``: a damaged bundle or one with another schema may be overwritten, but
    never a user's own files.
    """
    if not out.is_dir():
        raise InputError(f"{out} is not overwritten: it is not a folder")
    try:
        raw = integrity.parse_strict(manifest_bytes(out), MANIFEST_FILE)
        listed = raw.get("files")
        if type(raw.get("schema_version")) is not int or not isinstance(listed, dict):
            raise InputError(
                f"{out} is not overwritten: its {MANIFEST_FILE} is not that of a bundle"
            )
        extra = sorted(list_files(out, MAX_FILES).keys() - listed.keys() - set(OWN_FILES))
    except BundleError as error:
        raise InputError(f"{out} is not overwritten: it is not a bundle ({error})") from error
    if extra:
        raise InputError(
            f"{out} is not overwritten: {extra[0]!r} is in it, which is not part of a bundle"
        )
