"""``ssdevice web``: the page that runs a bundle in a browser, served on this machine or written for
a static host.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ssdevice.bundle.folder import Bundle, check_outside
from ssdevice.bundle.integrity import MANIFEST_FILE
from ssdevice.bundle.staging import Stage, check_writable, disk_errors
from ssdevice.commands.opening import add_signature, open_bundle, refuse_ignored, whole
from ssdevice.errors import BundleError, InputError, needs_extra
from ssdevice.runtime.target import runtime_target
from ssdevice.serve.names import HOSTS, LOOPBACK, listen
from ssdevice.text.frames import NO_FRAMES

if TYPE_CHECKING:
    from ssdevice.serve.guard import Guard

PORT = 8080
TREE = Path(__file__).resolve().parents[2] / "apps" / "web_demo"
INSTALLED = Path(__file__).resolve().parents[1] / "web"
"""Where a wheel has the sources of the page."""
SOURCES = ("*.html", "*.css", "*.js")
MODULES = "node_modules"
RUNTIME = (
    "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "@huggingface/tokenizers/dist/tokenizers.min.mjs",
)
"""What the page loads of other packages, below MODULES."""
POLICY = (
    "default-src 'self'",
    "script-src 'self' 'wasm-unsafe-eval'",
    "img-src 'self' data:",
    "base-uri 'none'",
)
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",  # with the next: memory that threads share
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Content-Security-Policy": "; ".join(POLICY),  # nothing is loaded from elsewhere
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".wasm": "application/wasm",
}
"""Not as the system has them: a browser compiles no other type while it loads it, and runs no other
as a module.
"""
HEADERS_FILE = "_headers"
"""Where several static hosts look for them."""
Site = Mapping[str, Path]
"""Path below the page's address -> the file there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder of an ONNX bundle, INT8 or FP32")
    add_signature(parser)
    add(
        "--port",
        type=whole(0, 65535),
        metavar="N",
        help=f"port on {LOOPBACK} (default {PORT}; 0: any free one)",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the page into a new folder instead of serving it",
    )
    add(
        "--runtime",
        type=Path,
        metavar="DIR",
        help=f"folder {MODULES} with its packages (default: of `make web`)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted, or write it."""
    if args.out is not None:
        refuse_ignored(args, "--out writes the page and serves nothing", "--port")
        check_outside(args.bundle, args.out)
        check_empty(args.out)
    files = site(open_bundle(args), args.runtime)
    if args.out is not None:
        write(files, args.out)
        return 0
    with needs_extra("serve"):
        from ssdevice.serve.guard import server
    with closing(listen(LOOPBACK, PORT if args.port is None else args.port)) as listening:
        print(f"http://{LOOPBACK}:{listening.getsockname()[1]}/", flush=True)
        with suppress(KeyboardInterrupt):
            server(page(files, HEADERS)).run(sockets=[listening])
    return 0


def site(bundle: Bundle, runtime: Path | None = None) -> Site:
    """The files of the page with a bundle.

    ``runtime``: a folder ``node_modules``. Raises BundleError for a bundle that no browser runs,
    InputError if a file of the runtime is missing.
    """
    manifest = bundle.manifest
    runtime_target(manifest.target).check_browser(bundle)
    if manifest.chat.frames is None:
        raise BundleError(f"{bundle.folder}: {NO_FRAMES}")
    sources = INSTALLED if INSTALLED.is_dir() else TREE
    files = {file.name: file for pattern in SOURCES for file in sources.glob(pattern)}
    for name in RUNTIME:
        file = (runtime or sources / MODULES) / name
        if not file.is_file():
            listed = json.loads((sources / "package.json").read_text("utf-8"))["dependencies"]
            packages = " ".join(f"{package}@{version}" for package, version in listed.items())
            raise InputError(
                f"{file} is missing: run `make web` in a checkout, or `npm install {packages}` "
                f"anywhere and pass --runtime {MODULES}"
            )
        files[f"runtime/{file.name}"] = file
    return files | {
        f"bundle/{name}": bundle.folder / name for name in (*manifest.files, MANIFEST_FILE)
    }


def check_empty(out: Path) -> None:
    """Raise InputError unless ``out`` is a folder to be made, or an empty one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out}: exists; choose another folder")
    check_writable(out, "--out")


def write(files: Site, out: Path) -> None:
    """Write the page into a new folder. Raises InputError if there is something in it."""
    check_empty(out)
    with closing(Stage(out, folder=True)) as stage, disk_errors(out):
        for name, source in files.items():
            file = stage.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, file)
        lines = "".join(f"  {name}: {value}\n" for name, value in HEADERS.items())
        (stage.path / HEADERS_FILE).write_text(f"/*\n{lines}", "utf-8")
        stage.publish(replace=out.exists())


def page(files: Site, headers: Mapping[str, str]) -> "Guard":
    """The application (ASGI) that answers with these files and ``headers``, and only to pages of
    this machine.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from ssdevice.serve.guard import Guard
    from ssdevice.serve.metrics import Metrics

    async def answer(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        if path not in files:
            return PlainTextResponse("Not Found", 404)
        kind = TYPES.get(PurePosixPath(path).suffix, "application/octet-stream")
        return FileResponse(files[path], headers=headers, media_type=kind)

    return Guard(Starlette(routes=[Route("/{path:path}", answer)]), Metrics(), HOSTS, None)
