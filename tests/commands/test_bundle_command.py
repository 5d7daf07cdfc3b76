"""``ssdevice bundle``: apps and signatures, as a user calls them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import AdapterKind
from ssdevice.cli import main
from ssdevice.errors import InputError
from tests.bundle.samples import fill, sample_manifest, write_sample


def call(*args: object) -> int:
    """The exit code of ``ssdevice bundle``."""
    return main(["bundle", *map(str, args)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "bundle").folder


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public half."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as form

    key = ed25519.Ed25519PrivateKey.generate()
    private = tmp_path / "private.pem"
    public = tmp_path / "public.pem"
    private.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def test_a_bundle_that_another_process_has_rewritten_is_not_overwritten(folder: Path) -> None:
    mine = Bundle.open(folder)
    other = Bundle.open(folder)
    folder.chmod(0o700)
    rest = tuple(app for app in other.manifest.apps if app.name != other.manifest.default_app)
    with BundleWriter(folder, overwrite=True) as writer:
        writer.add_bundle(other)
        writer.commit(dataclasses.replace(other.manifest, apps=rest, default_app=rest[0].name))
    assert folder.stat().st_mode & 0o777 == 0o700
    with (
        pytest.raises(InputError, match="changed by another process"),
        BundleWriter(folder, overwrite=True) as writer,
    ):
        writer.add_bundle(mine)
    assert Bundle.open(folder).manifest.apps == rest


def check(folder: Path, *args: object) -> int:
    """The exit code of a check of a bundle's files."""
    return main(["verify", str(folder), "--integrity-only", *map(str, args)])


def test_a_signature_is_made_checked_and_required(
    folder: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = keys
    assert check(folder) == 0
    assert "signature valid" not in capsys.readouterr().out
    assert check(folder, "--require-signature", public) == 2
    assert "manifest.json.sig" in capsys.readouterr().err
    assert call("sign", folder, "--key", private) == 0
    assert check(folder, "--require-signature", public) == 0
    assert "signature valid" in capsys.readouterr().out
    (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace("SQL", "sql")
    )
    assert check(folder) == 0
    capsys.readouterr()
    for command in (["run", str(folder), "--prompt", "hello"], ["verify", str(folder)]):
        assert main([*command, "--require-signature", str(public)]) == 2
        assert "was not signed with the key" in capsys.readouterr().err


def test_a_damaged_bundle_is_neither_signed_nor_passed(
    folder: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    weights = folder / "model.onnx.data"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert check(folder) == call("sign", folder, "--key", keys[0]) == 2
    assert capsys.readouterr().err.count("model.onnx.data is damaged") == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        "bundle",
        "private.pem",
        "public.pem",
    ]


def test_an_app_leaves_with_its_files(
    folder: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sign", folder, "--key", keys[0]) == 0
    assert call("remove-app", folder, "sql") == 2
    assert "--default base" in capsys.readouterr().err
    assert call("remove-app", folder, "sql", "--default", "sql") == 2
    assert call("remove-app", folder, "tables", "--default", "base") == 2
    assert "it has base, sql" in capsys.readouterr().err
    assert call("remove-app", folder, "sql", "--default", "base") == 0
    assert "sign it again" in capsys.readouterr().out
    left = Bundle.open(folder).manifest
    assert [app.name for app in left.apps] == ["base"] and left.default_app == "base"
    assert (
        not any("sql" in name for name in (*left.files, *left.roles)) and "model.onnx" in left.files
    )
    assert call("remove-app", folder, "base") == 2
    assert "at least one" in capsys.readouterr().err


def test_an_app_in_the_graph_does_not_leave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = sample_manifest()
    apps = tuple(
        dataclasses.replace(app, kind=AdapterKind.MERGED) if app.name == "sql" else app
        for app in manifest.apps
    )
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        bundle = writer.commit(dataclasses.replace(manifest, apps=apps))
    assert call("remove-app", bundle.folder, "sql", "--default", "base") == 2
    assert "export the others again" in capsys.readouterr().err
    assert Bundle.open(bundle.folder).manifest == bundle.manifest


def test_an_app_needs_a_slot(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("add-app", folder, "tables=adapters/tables") == 2
    error = capsys.readouterr().err
    assert (
        "no slot" in error and "ssdevice export --slots --adapter tables=adapters/tables" in error
    )
    assert call("add-app", folder, "tables") == 2
    assert "NAME=DIR" in capsys.readouterr().err
    assert call("add-app", folder, "sql=adapters/tables") == 2
    assert "has an app 'sql'" in capsys.readouterr().err


def test_an_app_of_core_ml_needs_another_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        fill(writer)
        writer.commit(dataclasses.replace(sample_manifest(), target="coreml"))
    assert call("add-app", tmp_path / "bundle", "tables=adapters/tables") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "functions of one package" in line
    assert (
        "ssdevice export --model BASE --target coreml --quant int8 --adapter sql=DIR --adapter "
        f"tables=adapters/tables --out {tmp_path / 'bundle'} --overwrite"
    ) in line
