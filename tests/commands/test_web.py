"""``ssdevice web``: the page's files and headers, and what it refuses."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.manifest import CacheDtype, Precision
from ssdevice.cli import main
from ssdevice.commands import web
from ssdevice.commands.web import HEADERS, page
from ssdevice.contract import CacheForm, functions
from ssdevice.errors import InputError
from ssdevice.serve.names import LOOPBACK
from ssdevice.text.chat_template import ChatFormat
from tests.bundle.samples import fill, sample_manifest, write_sample
from tests.serve.serving import running


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_sample(tmp_path / "bundle")


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A folder with files in the places of the packages'."""
    for name in web.RUNTIME:
        file = tmp_path / "node_modules" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "node_modules"


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which ``ssdevice web`` refuses these arguments."""
    assert main(["web", *map(str, args)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def changed(out: Path, **changes: object) -> Path:
    """A bundle with another manifest."""
    with BundleWriter(out) as writer:
        fill(writer)
        return writer.commit(replace(sample_manifest(), **changes)).folder  # type: ignore[arg-type]


def cached(out: Path, dtype: CacheDtype) -> Path:
    """A bundle with another type of cache."""
    specs = functions(sample_manifest().geometry, CacheForm.EXTERNAL, dtype)
    return changed(out, cache_dtype=dtype, functions=tuple(specs.values()))


def test_a_bundle_that_no_browser_runs_is_refused(
    tmp_path: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, changed(tmp_path / "a", precision=Precision.INT4), "--runtime", runtime)
    assert "is INT4, for which browsers have no fast kernel; export with --quant int8" in said
    said = refused(capsys, changed(tmp_path / "b", target="coreml"), "--runtime", runtime)
    assert "is for coreml; browsers run bundles of --target onnx" in said
    said = refused(capsys, cached(tmp_path / "c", CacheDtype.BF16), "--runtime", runtime)
    assert "has a cache of bfloat16; browsers need float32 or float16" in said
    template = ChatFormat("{{ messages[0].content }}", {}, (1,))
    said = refused(capsys, changed(tmp_path / "d", chat=template), "--runtime", runtime)
    assert "its chat template is more than texts around messages" in said


@pytest.mark.parametrize("dtype", [CacheDtype.FP32, CacheDtype.FP16])
def test_a_cache_of_a_type_that_browsers_have_is_accepted(
    tmp_path: Path, runtime: Path, dtype: CacheDtype
) -> None:
    out = tmp_path / "site"
    assert (
        main(
            [
                "web",
                str(cached(tmp_path / "a", dtype)),
                "--runtime",
                str(runtime),
                "--out",
                str(out),
            ]
        )
        == 0
    )
    assert (out / "bundle" / "manifest.json").exists()


def test_no_bundle_and_a_damaged_one_are_refused(
    tmp_path: Path, bundle: Bundle, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such bundle" in refused(capsys, tmp_path / "nothing", "--runtime", runtime)
    (bundle.folder / "model.onnx").write_bytes(b"a grapH")
    assert "is damaged" in refused(capsys, bundle.folder, "--runtime", runtime)


def test_a_missing_runtime_is_named(
    bundle: Bundle, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runtime / web.RUNTIME[1]).unlink()
    said = refused(capsys, bundle.folder, "--runtime", runtime)
    versions = json.loads((web.TREE / "package.json").read_text("utf-8"))["dependencies"]
    assert f"{web.RUNTIME[1]} is missing: run `make web` in a checkout, or `npm install" in said
    assert all(f"{name}@{version}" in said for name, version in versions.items())


def test_a_port_that_cannot_be_had_is_refused(
    bundle: Bundle, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        said = refused(capsys, bundle.folder, "--runtime", runtime, "--port", port)
    assert f"--port {port} is taken; choose another (0: any free one)" in said
    assert "expected 0 to 65535" in refused(
        capsys, bundle.folder, "--runtime", runtime, "--port", 70000
    )


def test_a_folder_for_a_static_host(
    tmp_path: Path, bundle: Bundle, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "site"
    assert main(["web", str(bundle.folder), "--runtime", str(runtime), "--out", str(out)]) == 0
    Bundle.open(out / "bundle")
    assert {file.name for file in (out / "runtime").iterdir()} == {
        Path(name).name for name in web.RUNTIME
    }
    assert {file.name for file in out.glob("*.js")} == {file.name for file in web.TREE.glob("*.js")}
    assert "  Cross-Origin-Embedder-Policy: require-corp\n" in (out / web.HEADERS_FILE).read_text(
        "utf-8"
    )
    said = refused(capsys, bundle.folder, "--runtime", runtime, "--out", out)
    assert f"--out {out}: exists; choose another folder" in said


@pytest.fixture
def connection(bundle: Bundle, runtime: Path) -> Iterator[HTTPConnection]:
    """To a server of the page."""
    with running(page(web.site(bundle, runtime), HEADERS)) as port:
        yield HTTPConnection(LOOPBACK, port, timeout=30)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/worker.js", "text/javascript; charset=utf-8"),
        ("/runtime/ort-wasm-simd-threaded.wasm", "application/wasm"),
        ("/bundle/manifest.json", "application/json"),
        ("/bundle/model.onnx.data?again", "application/octet-stream"),
    ],
)
def test_what_is_served_lets_threads_share_memory(
    connection: HTTPConnection, path: str, kind: str
) -> None:
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
    assert len(content) == int(answer.headers["Content-Length"]) > 0
    assert all(answer.headers[name] == value for name, value in HEADERS.items())


@pytest.mark.parametrize(
    "path", ["/package.json", "/bundle/", "/bundle/../worker.js", "//etc/passwd", "/node_modules"]
)
def test_nothing_else_is_served(connection: HTTPConnection, path: str) -> None:
    connection.request("GET", path)
    assert connection.getresponse().status == 404


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST:9000", "127.0.0.1:80"])
def test_this_machine_may_be_called_by_its_names(connection: HTTPConnection, name: str) -> None:
    assert status_of(connection, name) == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""]
)
def test_another_name_is_refused(connection: HTTPConnection, name: str) -> None:
    assert status_of(connection, name) == 421


@pytest.mark.parametrize("names", [[], ["127.0.0.1", "evil.example"]])
def test_no_name_and_two_names_are_refused(connection: HTTPConnection, names: list[str]) -> None:
    assert status_of(connection, *names) in (400, 421)


def status_of(connection: HTTPConnection, *names: str) -> int:
    """The status of a request with these headers ``Host``."""
    connection.putrequest("GET", "/bundle/manifest.json", skip_host=True)
    for name in names:
        connection.putheader("Host", name)
    connection.endheaders()
    return connection.getresponse().status


def test_a_part_of_a_file(connection: HTTPConnection) -> None:
    connection.request("GET", "/bundle/model.onnx", headers={"Range": "bytes=2-4"})  # of "a graph"
    answer = connection.getresponse()
    assert (answer.status, answer.read(), answer.headers["Content-Range"]) == (
        206,
        b"gra",
        "bytes 2-4/7",
    )


@pytest.mark.parametrize(("path", "status"), [("/bundle/model.onnx", 200), ("/nothing", 404)])
def test_head_is_get_without_the_content(
    connection: HTTPConnection, path: str, status: int
) -> None:
    connection.request("HEAD", path)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (status, b"")
    assert status == 404 or int(answer.headers["Content-Length"]) == 7


def test_a_reader_that_leaves_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 24))
    with running(page({"index.html": tmp_path / "large"}, HEADERS)) as port:
        with socket.create_connection((LOOPBACK, port), timeout=30) as leaving:
            leaving.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            leaving.recv(1)
        other = HTTPConnection(LOOPBACK, port, timeout=30)
        other.request("HEAD", "/")
        assert other.getresponse().status == 200
    assert capfd.readouterr().err == ""


def test_a_page_is_written_whole_and_not_into_the_bundle(
    bundle: Bundle,
    runtime: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "is inside the bundle" in refused(capsys, bundle.folder, "--out", bundle.folder / "site")
    out = tmp_path / "site"

    def full(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(InputError, match="site: Input/output error"):
        web.write({"a": bundle.folder / "manifest.json"}, out)
    assert not out.exists() and not list(tmp_path.glob(".site*"))
