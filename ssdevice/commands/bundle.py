"""``ssdevice bundle``: change a bundle: sign it, add and remove apps."""

import argparse
import dataclasses
from pathlib import Path

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.bundle.integrity import sign_bundle
from ssdevice.bundle.manifest import AdapterKind, Precision
from ssdevice.commands.inspect import abilities_line
from ssdevice.commands.opening import add_adapter_precision, named_folder
from ssdevice.errors import InputError, needs_extra
from ssdevice.model.tokenizer import difference, open_tokenizer, tokenizer_folder
from ssdevice.progress import count
from ssdevice.runtime.apps import add_app, signature_lost
from ssdevice.runtime.opened import tokenizer_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # No defaults: one here would override the same option given before the action's name.
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    shared.add_argument(
        "--quiet", action="store_true", default=argparse.SUPPRESS, help="do not say what was done"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        described = f"{summary[0].upper()}{summary[1:]}."
        return actions.add_parser(name, help=summary, description=described, parents=[shared])

    shared.add_argument("bundle", type=Path, metavar="BUNDLE", help="bundle folder")
    signing = action(
        "sign", "check a bundle and sign its manifest, which contains the hash of every file"
    )
    signing.add_argument(
        "--key", type=Path, required=True, metavar="PRIVATE.pem", help="ed25519 private key"
    )

    adding = action(
        "add-app", "add an app to a bundle whose base has slots, without exporting the base again"
    )
    adding.add_argument("app", metavar="[NAME=]DIR", help="app and its adapter folder")
    add_adapter_precision(adding)

    removing = action("remove-app", "remove an app whose weights are separate files")
    removing.add_argument("app", metavar="NAME", help="the app to remove")
    removing.add_argument(
        "--default", metavar="NAME", help="the new default app, if the default one is removed"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the action, completely or not at all."""
    bundle = Bundle.open(args.bundle)  # a signature must not vouch for damaged files
    actions = {"sign": _sign, "add-app": _add_app, "remove-app": _remove_app}
    said = actions[args.action](args, bundle)
    if not args.quiet:
        print(said)
        print(abilities_line(Bundle.open(args.bundle, verify=False).manifest))
    return 0


def _sign(args: argparse.Namespace, bundle: Bundle) -> str:
    return f"signed {args.bundle}: {sign_bundle(bundle.folder, args.key).name}"


def _add_app(args: argparse.Namespace, bundle: Bundle) -> str:
    name, folder = named_folder(args.app)
    # The adapter may bring a tokenizer, and a chat template.
    if tokenizer_folder(bundle.folder, folder) != bundle.folder:
        with needs_extra("export"):
            its = open_tokenizer(bundle.folder, folder)
        parts = difference(tokenizer_of(bundle), its)
        if parts is not None:
            raise InputError(
                f"{folder} and {bundle.folder} need different {parts}: export the app apart"
            )
    return add_app(bundle, name, folder, Precision(args.adapter_precision))


def _remove_app(args: argparse.Namespace, bundle: Bundle) -> str:
    manifest = bundle.manifest
    app = bundle.app(args.app)
    rest = tuple(other for other in manifest.apps if other is not app)
    if not rest:
        raise InputError(
            f"{args.bundle} has only the app {app.name!r}; a bundle needs at least one"
        )
    if app.kind in (AdapterKind.MERGED, AdapterKind.FUNCTION):
        raise InputError(
            f"app {app.name!r} of {args.bundle} is {app.kind.value}: its weights are in the "
            "graphs, not in separate files; export the others again"
        )
    names = [other.name for other in rest]
    if args.default is not None and args.default not in names:
        raise InputError(
            f"--default {args.default!r} is not one of the remaining apps: {', '.join(names)}"
        )
    if args.default is None and manifest.default_app == app.name:
        raise InputError(f"app {app.name!r} is the default one; name another: --default {names[0]}")
    default = args.default or manifest.default_app
    own = {*app.files}
    if app.folder is not None:
        own |= {path for path in manifest.files if path.startswith(f"{app.folder}/")}
    for other in rest:
        own -= {*other.files}
    gone = frozenset(own)
    again = signature_lost(bundle)
    with BundleWriter(bundle.folder, overwrite=True) as writer:
        writer.add_bundle(bundle, without=gone)
        writer.commit(
            dataclasses.replace(manifest, apps=rest, default_app=default, files={}, roles={})
        )
    return f"removed app {app.name} from {args.bundle} ({count(len(gone), 'file')}){again}"
