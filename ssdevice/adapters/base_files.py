"""The files of a Hugging Face folder that hold the base's weights: those that transformers reads,
and no others.
"""

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
    first = next(
        (name for name in ([str(named)] if named else [WHOLE, INDEX]) if (folder / name).is_file()),
        None,
    )
    if first is None:
        others = sorted(
            file.name for kind in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(kind)
        )
        found = (
            f" ({others[0]} is not what transformers loads; {_conversion(others[0])})"
            if others
            else ""
        )
        raise InputError(f"{folder}: no .safetensors weights: neither {WHOLE} nor {INDEX}{found}")
    files = [folder / first]
    if first.endswith(".json"):
        files = [folder / name for name in shards(files[0])]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"{file}: no such file, but {first} lists it: the folder is not complete; get it again"
            )
        check_no_pointer(file)
    return files


def _conversion(name: str) -> str:
    variant = _VARIANT.fullmatch(name)
    given = f", variant={variant[1]!r}" if variant else ""
    return f"convert it with transformers: AutoModelForCausalLM.from_pretrained(MODEL{given}).save_pretrained(FOLDER)"


def shards(index: Path) -> list[str]:
    """The names of the files that an index lists, sorted; raises InputError."""
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(name, str) for name in places.values())
    ):
        raise InputError(f"{index}: 'weight_map' is not a table of tensor to file; get it again")
    return sorted(set(places.values()))


def weights_sha256(folder: Path) -> str:
    """sha256 over the names and contents of a folder's ``weight_files``."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
