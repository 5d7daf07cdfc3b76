"""Signatures of bundles: ed25519 over the bytes of the manifest, which contains the hash of every other file.
``manifest.json.sig`` is the signature in base64; ``openssl pkeyutl -verify -rawin`` checks the same bytes."""

from __future__ import annotations

import base64
import binascii
from contextlib import closing
from pathlib import Path
from typing import Any

from ssdevice.bundle.integrity import MANIFEST_FILE, SIGNATURE_FILE, manifest_bytes, read_bounded
from ssdevice.bundle.staging import Stage, disk_errors, sync_tree
from ssdevice.errors import BundleError, InputError, MissingExtraError

MAX_SIGNATURE_BYTES = 1024
MAX_KEY_BYTES = 1 << 16
EXTRA = "sign"


def verify_signature(manifest_bytes: bytes, signature: bytes, key: Path) -> None:
    """Raise BundleError unless ``signature`` (base64) of the manifest was made with the private half of ``key``, a PEM
    file with an ed25519 public key. Raises InputError for another key, MissingExtraError without cryptography."""
    public = _load_key(key, private=False)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(base64.b64decode(signature.strip(), validate=True), manifest_bytes)
    except binascii.Error as error:
        raise BundleError(f"{SIGNATURE_FILE}: not base64") from error
    except InvalidSignature as error:
        raise BundleError(f"{SIGNATURE_FILE}: {MANIFEST_FILE} was not signed with the key of {key}") from error


def sign_bundle(folder: Path, private_key: Path) -> Path:
    """Write ``manifest.json.sig`` with an ed25519 private key (unencrypted PEM) and return its path. Raises InputError
    for a key that cannot be used, MissingExtraError without cryptography."""
    private = _load_key(private_key, private=True)
    data = manifest_bytes(folder)
    out = folder / SIGNATURE_FILE
    # Staged beside the bundle, not in it: a bundle with a stray file would be refused.
    with disk_errors(out), closing(Stage(folder.parent / f"{folder.name}.sig", folder=False)) as stage:
        stage.path.write_bytes(base64.b64encode(private.sign(data)) + b"\n")
        sync_tree(stage.path)
        stage.path.replace(out)
    return out


def _load_key(file: Path, private: bool) -> Any:
    """The ed25519 key in a PEM file. Raises InputError for any other content, MissingExtraError."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError(EXTRA, "cryptography") from error
    try:
        data = read_bounded(file, MAX_KEY_BYTES)
        key = serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
    except BundleError as error:
        raise InputError(str(error)) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        expected = "an unencrypted private key" if private else "a public key"
        raise InputError(f"{file}: not {expected} in PEM form") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey):
        raise InputError(f"{file}: not an ed25519 key")
    return key
