"""The files of a Hugging Face folder from which transformers reads the base's weights."""

import hashlib
import re
from pathlib import Path

from ssdevice.config import read_json
from ssdevice.errors import InputError, check_no_pointer
from ssdevice.text.chat_template import CONFIG_FILE, read_object

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_VARIANT = re.compile(r"(?:pytorch_)?model\.([^.]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
"""Files of weights that transformers opens only if ``variant`` names them."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files from which transformers would load a folder, in the order of their
    names.

    Raises InputError if there are none, or if one of them is missing or a Git LFS pointer.
    """
    named = read_object(folder / CONFIG_FILE).get("transformers_weights")
    candidates = [str(named)] if named else [WHOLE, INDEX]
    present = [name for name in candidates if (folder / name).is_file()]
    if not present:
        raise InputError(
            f"{folder}: no .safetensors weights: neither {WHOLE} nor {INDEX}{_other_files(folder)}"
        )
    first = present[0]
    files = [folder / first]
    if first.endswith(".json"):
        files = [folder / name for name in shards(folder / first)]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{file}: no such file, but {first} lists it: "
                "the folder is not complete; get it again"
            )
        check_no_pointer(file)
    return files


def _other_files(folder: Path) -> str:
    """What a message adds about weights that transformers does not load; empty without any."""
    others = list[str]()
    for kind in ("*.safetensors", "*.bin", "*.gguf"):
        others += [file.name for file in folder.glob(kind)]
    if not others:
        return ""
    name = min(others)
    variant = _VARIANT.fullmatch(name)
    given = f", variant={variant[1]!r}" if variant is not None else ""
    return (
        f" ({name} is not what transformers loads; convert it with transformers: "
        f"AutoModelForCausalLM.from_pretrained(MODEL{given}).save_pretrained(FOLDER))"
    )


def shards(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted; raises InputError."""
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if isinstance(places, dict) and places:
        names = set(places.values())
        if all(isinstance(name, str) for name in names):
            return sorted(names)
    raise InputError(f"{index}: 'weight_map' is not a table of tensor to file; get it again")


def weights_sha256(folder: Path) -> str:
    """sha256 over the names and contents of a folder's ``weight_files``."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
