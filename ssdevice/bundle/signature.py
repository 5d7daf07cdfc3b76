"""Signatures of bundles: ed25519 over the bytes of the manifest, which holds the hash of every other file.

``manifest.json.sig`` is the signature in base64. ``openssl pkeyutl -verify -rawin`` checks the same bytes.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from ssdevice.bundle.integrity import MANIFEST_FILE, MAX_MANIFEST_BYTES, SIGNATURE_FILE, read_bounded
from ssdevice.bundle.staging import Stage, disk_errors, sync_tree
from ssdevice.errors import BundleError, InputError, MissingExtraError

MAX_SIGNATURE_BYTES = 1024
MAX_KEY_BYTES = 1 << 16
EXTRA = "sign"


def verify_signature(manifest_bytes: bytes, signature: bytes, key: Path) -> None:
    """Raise BundleError unless ``signature`` (base64) of the manifest was made with the private half of ``key``.

    ``key``: a PEM file with an ed25519 public key; InputError if it is none. MissingExtraError without cryptography.
    """
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise MissingExtraError(EXTRA, "cryptography") from error
    try:
        public = load_pem_public_key(_read_key(key))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{key}: not a public key in PEM form") from error
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{key}: not an ed25519 key")
    try:
        public.verify(base64.b64decode(signature.strip(), validate=True), manifest_bytes)
    except binascii.Error as error:
        raise BundleError(f"{SIGNATURE_FILE}: not base64") from error
    except InvalidSignature as error:
        raise BundleError(f"{SIGNATURE_FILE}: {MANIFEST_FILE} was not signed with the key of {key}") from error


def sign_bundle(folder: Path, private_key: Path) -> Path:
    """Write ``manifest.json.sig`` with an ed25519 private key (unencrypted PEM); the path of the signature.

    Raises InputError for a key that cannot be used, MissingExtraError without cryptography.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise MissingExtraError(EXTRA, "cryptography") from error
    try:
        private = load_pem_private_key(_read_key(private_key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InputError(f"{private_key}: not an unencrypted private key in PEM form") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InputError(f"{private_key}: not an ed25519 key")
    data = read_bounded(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    out = folder / SIGNATURE_FILE
    with disk_errors(out):
        # Beside the bundle, not in it: a bundle with a stray file would be refused.
        stage = Stage(folder.parent / f"{folder.name}.sig", folder=False)
        try:
            stage.path.write_bytes(base64.b64encode(private.sign(data)) + b"\n")
            sync_tree(stage.path)
            stage.path.replace(out)
        finally:
            stage.close()
    return out


def _read_key(file: Path) -> bytes:
    try:
        return read_bounded(file, MAX_KEY_BYTES)
    except BundleError as error:
        raise InputError(str(error)) from error
