"""``ssdevice serve``: OpenAI's endpoints over a bundle, for one user and the programs of this
machine.
"""

import argparse
import ipaddress
import sys
from contextlib import closing, suppress
from pathlib import Path

from ssdevice.commands.opening import (
    add_engine,
    add_signature,
    add_special_tokens,
    key_in,
    open_session,
    whole,
)
from ssdevice.errors import InputError, needs_extra
from ssdevice.serve.names import HOSTS, LOOPBACK, listen

PORT = 8000
WAITING = 16
DEVICES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "bundle",
        type=Path,
        metavar="BUNDLE",
        help="bundle folder; its apps are the names of models",
    )
    add_signature(parser)
    parser.set_defaults(app=None)
    add(
        "--port",
        type=whole(0, 65535),
        default=PORT,
        metavar="N",
        help=f"default {PORT}; 0: any free one",
    )
    add(
        "--host",
        default=LOOPBACK,
        metavar="ADDRESS",
        help=f"address to listen on (default {LOOPBACK}); needs a key",
    )
    add("--key-file", type=Path, metavar="FILE", help="a file with the key that requests must bear")
    add(
        "--queue",
        type=whole(0, 10_000),
        default=WAITING,
        metavar="N",
        help=f"requests that may wait while one is answered (default {WAITING}); others are told "
        "to come back",
    )
    add(
        "--verify",
        type=whole(1, 256),
        nargs="?",
        const=DEVICES,
        default=0,
        metavar="N",
        help="verify drafts of devices (run --verify-at), with a KV cache for each of the last N "
        f"(default {DEVICES})",
    )
    add_special_tokens(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Answer requests until interrupted."""
    key = key_in(args.key_file, "--key-file")
    local = _is_loopback(args.host)
    if key is None and not local:
        raise InputError(f"--host {args.host}: a server that others can reach needs --key-file")
    with needs_extra("serve"):
        from ssdevice.serve.application import application
        from ssdevice.serve.guard import server
    with closing(listen(args.host, args.port)) as listening, open_session(args) as session:
        app = application(
            session,
            waiting=args.queue,
            hosts=HOSTS if local else None,
            key=key,
            devices=args.verify,
        )
        name = f"[{args.host}]" if ":" in args.host else args.host
        print(f"http://{name}:{listening.getsockname()[1]}/v1", flush=True)
        if not args.quiet:
            apps = ", ".join(app.name for app in session.bundle.manifest.apps)
            print(f"ssdevice: models: {apps}; Ctrl-C ends the server", file=sys.stderr)
        with suppress(KeyboardInterrupt):
            server(app).run(sockets=[listening])
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise InputError(
            f"--host {host}: expected an address such as {LOOPBACK}, 0.0.0.0 or ::1"
        ) from None
