"""A signed bundle opens with its key alone; no file of it can be changed without the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.integrity import sign_bundle
from ssdevice.errors import BundleError, InputError
from tests.bundle.samples import edit_manifest, write_sample

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a new private key and its public half."""
    key = Ed25519PrivateKey.generate()
    private = folder / f"{name}.pem"
    public = folder / f"{name}.pub.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def test_a_signed_bundle_opens_with_its_key_alone(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    _, other = key_pair(tmp_path, "other")
    folder = write_sample(tmp_path / "bundle").folder
    with pytest.raises(BundleError, match="manifest.json.sig: no such file"):
        Bundle.open(folder, require_signature=public)
    assert sign_bundle(folder, private) == folder / "manifest.json.sig"
    Bundle.open(folder, require_signature=public)
    Bundle.open(folder)
    with pytest.raises(BundleError, match="was not signed with the key of .*other"):
        Bundle.open(folder, require_signature=other)
    assert not list(tmp_path.glob(".*"))


def test_no_change_passes_a_required_signature(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    folder = write_sample(tmp_path / "bundle").folder
    sign_bundle(folder, private)
    weights = folder / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(BundleError, match="model.onnx.data is damaged"):
        Bundle.open(folder, verify=False, require_signature=public)
    edit_manifest(folder, {"notes": []})
    with pytest.raises(BundleError, match="was not signed with the key"):
        Bundle.open(folder, require_signature=public)
    for signature in (b"", b"not base64!", b"AAAA", b"\xff\xfe"):
        (folder / "manifest.json.sig").write_bytes(signature)
        with pytest.raises(BundleError, match="manifest.json.sig"):
            Bundle.open(folder, require_signature=public)


def test_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    folder = write_sample(tmp_path / "bundle").folder
    sign_bundle(folder, private)
    curve = generate_private_key(SECP256R1())
    (tmp_path / "ec.pem").write_bytes(
        curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (tmp_path / "ec.pub").write_bytes(
        curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    for key, message in (
        (private, "not a public key"),
        (tmp_path / "ec.pub", "not an ed25519 key"),
        (tmp_path / "no", "no such"),
    ):
        with pytest.raises(InputError, match=message):
            Bundle.open(folder, require_signature=key)
    for key, message in (
        (public, "not an unencrypted private key"),
        (tmp_path / "ec.pem", "not an ed25519 key"),
    ):
        with pytest.raises(InputError, match=message):
            sign_bundle(folder, key)
