"""Checks of a bundle's files before any of them is trusted: bounds, names, strict JSON, sizes,
hashes and signature.

Nothing here knows the fields of a manifest; everything here assumes that someone hostile wrote it.

The signature is ed25519 over the bytes of the manifest, which has the hash of every other file, in
base64 in ``manifest.json.sig``. ``openssl pkeyutl -verify -rawin`` checks the same bytes.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from ssdevice import strict_json
from ssdevice.bundle.staging import Stage, disk_errors, sync_tree
from ssdevice.errors import BundleError, ConfigError, InputError, needs_extra, reading
from ssdevice.rules import Rule, check_rule, repeated_name

MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "manifest.json.sig"
MAX_MANIFEST_BYTES = 4 << 20
MAX_JSON_DEPTH = 32
MAX_SIGNATURE_BYTES = 1024
MAX_KEY_BYTES = 1 << 16

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
    """The folders that contain these files.

    Raises ConfigError for names that collide on some file system.
    """
    files = set(paths)
    folders = set[str]()
    for path in files:
        check_rule("files: a name", path, PATH)
        if path.lower() in (MANIFEST_FILE, SIGNATURE_FILE):
            raise ConfigError(f"files: {path!r} may not be listed, its name is reserved")
        parts = path.split("/")
        for part in filter(_DEVICES.fullmatch, parts):
            raise ConfigError(f"files: {path!r} has a name that Windows reserves, {part!r}")
        folders |= {"/".join(parts[:i]) for i in range(1, len(parts))}
    twice = repeated_name(path.lower() for path in [*files, *folders])
    if twice is not None:
        raise ConfigError(
            f"files: {twice!r} appears twice where case does not count, or is both a file and a "
            "folder"
        )
    return frozenset(folders)


def parse_strict(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in these bytes.

    Raises BundleError for anything on which two readers could disagree.
    """
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
    """Path -> size of every file below a folder.

    Raises BundleError for anything but plain files and folders: links are refused wherever they
    lead, because everything in a bundle is in its folder.
    """
    found: dict[str, int] = {}
    waiting = [""]
    seen = 0
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
                elif stat.S_ISLNK(status.st_mode):
                    raise BundleError(f"{folder}: {path!r} is a symbolic link")
                else:
                    raise BundleError(f"{folder}: {path!r} is not a plain file")
    return found


def read_bounded(file: Path, limit: int) -> bytes:
    """The content of a plain file of at most ``limit`` bytes.

    Raises BundleError for anything else.
    """
    with reading(file, BundleError):
        # O_NONBLOCK: opening a pipe must not wait for its writer.
        handle = os.open(
            file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        )
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
    """sha256 of the first ``size`` bytes of a file, None if it is shorter.

    Raises BundleError if it is unreadable.
    """
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


def verify_signature(folder: Path, manifest: bytes, key: Path) -> None:
    """Raise BundleError unless a bundle's ``manifest`` was signed with the private half of ``key``,
    a PEM file with an ed25519 public key.

    Raises InputError for another key, MissingExtraError without cryptography.
    """
    public = _load_key(key, private=False)
    from cryptography.exceptions import InvalidSignature

    try:
        signature = read_bounded(folder / SIGNATURE_FILE, MAX_SIGNATURE_BYTES)
        public.verify(base64.b64decode(signature.strip(), validate=True), manifest)
    except binascii.Error as error:
        raise BundleError(f"{SIGNATURE_FILE}: not base64") from error
    except InvalidSignature as error:
        raise BundleError(
            f"{SIGNATURE_FILE}: {MANIFEST_FILE} was not signed with the key of {key}"
        ) from error


def sign_bundle(folder: Path, private_key: Path) -> Path:
    """Write ``manifest.json.sig`` with an ed25519 private key (unencrypted PEM) and return its
    path.

    Raises InputError for a key that cannot be used, MissingExtraError without cryptography.
    """
    private = _load_key(private_key, private=True)
    out = folder / SIGNATURE_FILE
    # Staged beside the bundle, not in it: a bundle with a stray file would be refused.
    with (
        disk_errors(out),
        closing(Stage(folder.parent / f"{folder.name}.sig", folder=False)) as stage,
    ):
        stage.path.write_bytes(base64.b64encode(private.sign(manifest_bytes(folder))) + b"\n")
        sync_tree(stage.path)
        stage.path.replace(out)
    return out


def _load_key(file: Path, private: bool) -> Any:
    """The ed25519 key in a PEM file. Raises InputError for any other content, MissingExtraError."""
    with needs_extra("sign"):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    try:
        data = read_bounded(file, MAX_KEY_BYTES)
        key: Any = None
        if private:
            key = serialization.load_pem_private_key(data, None)
        else:
            key = serialization.load_pem_public_key(data)
    except BundleError as error:
        raise InputError(str(error)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if private:
            raise InputError(f"{file}: not an unencrypted private key in PEM form") from error
        raise InputError(f"{file}: not a public key in PEM form") from error
    kind: Any = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    if not isinstance(key, kind):
        raise InputError(f"{file}: not an ed25519 key")
    return key
