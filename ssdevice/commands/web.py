"""``ssdevice web``: the page that runs a bundle in a browser, served on this machine or written for a static host."""

from __future__ import annotations

import argparse
import errno
import json
import shutil
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ssdevice.commands.opening import add_signature, open_bundle
from ssdevice.errors import BundleError, InputError

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle

LOOPBACK = "127.0.0.1"
PORT = 8080
TREE = Path(__file__).resolve().parents[2] / "apps" / "web_demo"
INSTALLED = Path(__file__).resolve().parents[1] / "web"
SOURCES = ("*.html", "*.css", "*.js")
MODULES = "node_modules"
RUNTIME = (
    "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "@huggingface/tokenizers/dist/tokenizers.min.mjs",
)
"""What the page loads of other packages, below ``node_modules``."""
PROMPTS = "prompts.json"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
}
POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; object-src 'none'; base-uri 'none'"
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # with the next: memory that threads share
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Content-Security-Policy": POLICY,  # nothing is loaded from anywhere else
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
HEADERS_FILE = "_headers"
"""In which several static hosts look for them."""

Site = Mapping[str, Path | bytes]
"""Path below the page's address -> the file there, or its content."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``ssdevice web``."""
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="bundle folder for ONNX Runtime, INT8 or FP32")
    add_signature(parser)
    add("--port", type=int, default=PORT, metavar="N", help=f"port on {LOOPBACK} (default {PORT}; 0: any free one)")
    add("--out", type=Path, metavar="DIR", help="write the page into a new folder, instead of serving it")
    add("--runtime", type=Path, metavar="DIR", help="folder node_modules with its packages (default: of `make web`)")


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted, or write it."""
    files = site(open_bundle(args), args.runtime)
    if args.out is not None:
        write(files, args.out)
        return 0
    with server(files, args.port) as serving:
        print(f"http://{LOOPBACK}:{serving.server_port}/", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def site(bundle: Bundle, runtime: Path | None = None) -> Site:
    """The files of the page with a bundle. ``runtime``: a folder ``node_modules``.

    Raises BundleError for a bundle that no browser runs, InputError if the runtime's files are missing.
    """
    from ssdevice.bundle.folder import OWN_FILES
    from ssdevice.bundle.manifest import CacheDtype, Precision
    from ssdevice.text.tokenizer import ChatTokenizer, prompt_frame

    manifest = bundle.manifest
    if manifest.target != "onnx":
        raise BundleError(f"{bundle.folder} is for {manifest.target}; browsers run bundles of --target onnx")
    if manifest.precision is Precision.INT4:
        raise BundleError(f"{bundle.folder} is INT4, for which browsers have no kernel; export it with --quant int8")
    if manifest.cache_dtype is not CacheDtype.FP32:
        raise BundleError(f"{bundle.folder} has a cache of {manifest.cache_dtype}; browsers need float32")
    sources = INSTALLED if INSTALLED.is_dir() else TREE
    files: dict[str, Path | bytes] = {file.name: file for pattern in SOURCES for file in sources.glob(pattern)}
    for name in RUNTIME:
        file = (runtime or sources / MODULES) / name
        if not file.is_file():
            raise InputError(_missing(file, sources))
        files[f"runtime/{file.name}"] = file
    tokenizer = ChatTokenizer.from_bytes(bundle.file("tokenizer").read_bytes(), manifest.chat)
    frames = {app.name: prompt_frame(tokenizer, app.instruction) for app in manifest.apps}
    prompts = {name: {"before": before, "after": after} for name, (before, after) in frames.items()}
    files[PROMPTS] = json.dumps(prompts, ensure_ascii=False).encode("utf-8")
    return files | {f"bundle/{name}": bundle.folder / name for name in (*manifest.files, OWN_FILES[0])}


def _missing(file: Path, sources: Path) -> str:
    packages = json.loads((sources / "package.json").read_text("utf-8"))["dependencies"]
    named = " ".join(f"{name}@{version}" for name, version in packages.items())
    return f"{file} is missing: run `make web` in a checkout, or `npm install {named}` and pass --runtime {MODULES}"


def write(files: Site, out: Path) -> None:
    """Write the page into a new folder. Raises InputError if the folder has something in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists; choose another folder")
    for name, content in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copyfile(content, path)
    lines = "".join(f"  {name}: {value}\n" for name, value in HEADERS.items())
    (out / HEADERS_FILE).write_text(f"/*\n{lines}", "utf-8")


def server(files: Site, port: int) -> ThreadingHTTPServer:
    """A server of these files and nothing else, on loopback. Raises InputError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/") or "index.html"
            content = files.get(path)
            if content is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            self.send_response(HTTPStatus.OK)
            kind = TYPES.get(PurePosixPath(path).suffix, "application/octet-stream")
            for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(size)}.items():
                self.send_header(name, value)
            self.end_headers()
            if isinstance(content, bytes):
                self.wfile.write(content)
                return
            with content.open("rb") as stream:
                shutil.copyfileobj(stream, self.wfile)

        def log_message(self, format: str, *args: object) -> None:
            return

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OverflowError as error:
        raise InputError(f"--port {port}: expected 0 to 65535") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InputError(f"--port {port}: {error.strerror}") from error
        raise InputError(f"--port {port} is taken; choose another (0: any free one)") from error
