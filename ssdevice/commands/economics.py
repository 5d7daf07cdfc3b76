"""``ssdevice bundle economics``: what one more app costs on a device, by method."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ssdevice.commands.opening import check_new_file, positive
from ssdevice.errors import InputError

if TYPE_CHECKING:
    from ssdevice.bench.economics import BaseShape, Row

LORA_FILES = ("adapter_config.json", "adapter_model.safetensors")
STREAM_FILES = ("streams.json", "streams.safetensors")
APPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The base, the apps to measure on it, and how many to count."""
    parser.add_argument("--model", required=True, metavar="DIR", help="base folder, or llama-2-7b or phi-3-mini")
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="an adapter folder to measure; repeatable"
    )
    parser.add_argument("--bundle", type=Path, metavar="BUNDLE", help="a bundle whose apps are measured")
    parser.add_argument("--apps", type=positive, default=APPS, metavar="N", help=f"count 1 to N apps (default {APPS})")
    parser.add_argument("--rank", type=positive, default=32, metavar="R", help="rank of the computed LoRA (default 32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write a picture (needs ssdevice[bench])")


def run(args: argparse.Namespace) -> str:
    """The table or the JSON object; raises InputError for folders that are no base or no adapter."""
    from ssdevice.bench.economics import compare
    from ssdevice.bench.economics_report import as_json, as_table, plot

    check_new_file(args.plot, "--plot")
    base, size = _base(args.model)
    rows = [_adapter(text) for text in args.adapter]
    if args.bundle is not None:
        rows += _apps(args.bundle)
    economics = compare(base, lora_rank=args.rank, base_bytes=size).with_rows(rows)
    if args.plot is not None:
        plot(economics, args.apps, f"{Path(args.model).name}: one base, many apps", args.plot)
    if args.json:
        return json.dumps({"model": args.model, **as_json(economics, args.apps)}, ensure_ascii=False)
    return as_table(economics, args.apps)


def _base(model: str) -> tuple[BaseShape, int | None]:
    """The shape of a base and the bytes of its weights, None where there are none to measure."""
    from ssdevice.bench.economics import KNOWN, BaseShape
    from ssdevice.config import read_json

    folder = Path(model)
    if not folder.is_dir():
        if model in KNOWN:
            return KNOWN[model], None
        raise InputError(f"--model {model}: no such folder; without weights, {' and '.join(KNOWN)} are known")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'config.json'}: not an object")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return BaseShape.of(config, str(folder / "config.json")), size or None


def _adapter(text: str) -> Row:
    """The measured row of ``NAME=DIR``: the files that an app is made of, and nothing else in the folder."""
    from ssdevice.bench.economics import Row

    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise InputError(f"--adapter {text!r}: expected NAME=DIR")
    lora, streams = (_present(Path(place), names) for names in (LORA_FILES, STREAM_FILES))
    if not lora and not streams:
        raise InputError(f"--adapter {text}: no adapter folder: neither {STREAM_FILES[0]} nor {LORA_FILES[0]} in it")
    return Row(name, None, streams, lora + streams, measured=True)


def _present(folder: Path, names: tuple[str, ...]) -> int:
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())


def _apps(folder: Path) -> list[Row]:
    """The apps of a bundle whose weights are files of their own; raises InputError if there is none."""
    from ssdevice.bench.economics import Row
    from ssdevice.bundle.folder import Bundle

    manifest = Bundle.open(folder, verify=False).manifest  # sizes alone are used
    sizes = {app.name: sum(manifest.files[path].size for path in app.files) for app in manifest.apps if app.files}
    if not sizes:
        raise InputError(f"{folder}: no app has files of its own; its weights are in the graphs")
    return [Row(f"{name} in {folder.name}", None, size, size, measured=True) for name, size in sizes.items()]
