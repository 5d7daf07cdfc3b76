"""Adapter folders changed: settings, PEFT's configuration, headers of safetensors, and weights that
are no numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import files, json_values

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E5M2", "F4", "X", "")
FLOATS = {
    "F32": (b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff"),
    "F16": (b"\x00\x7e", b"\x00\x7c"),
}
PEFT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LOHA", "PROMPT_TUNING", "IA3", "XLORA", "NOPE", "", None, "lora", "VERA", "OFT"),
    "r": (0, -1, 1, 3, 10**5, 10**7, 10**9, 2**63, 1.5, "8", None, True),
    "lora_alpha": (0, -1, 10**30, 1e308, None, "x"),
    "target_modules": (
        "all-linear",
        ".*",
        "(a+)+$",
        [],
        ["nope"],
        ["q_proj"],
        ["embed_tokens", "lm_head"],
        None,
        7,
        "(",
    ),
    "task_type": ("SEQ_CLS", "NOPE", None, "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"),
    "bias": ("all", "lora_only", "nope", None),
    "use_dora": (True, "x"),
    "use_rslora": (True,),
    "fan_in_fan_out": (True,),
    "init_lora_weights": ("pissa", "olora", "loftq", "eva", "gaussian", "corda", "nope", False),
    "rank_pattern": ({".*": 10**7}, {"q_proj": 3}, {"(": 1}, [], None),
    "alpha_pattern": ({"q_proj": 1e30}, []),
    "layers_to_transform": ([0], 99, [], [-1], "x"),
    "modules_to_save": (["lm_head"], ["embed_tokens"], [""], "x"),
    "layer_replication": ([[0, 2], [0, 2]], [[0, 100000]], [[-1, 1]]),
    "megatron_config": ({},),
    "base_model_name_or_path": ("/etc", "../..", None, 7),
    "auto_mapping": ({"base_model_class": "X", "parent_library": "os"},),
    "trainable_token_indices": ([0, 1], [10**9]),
    "target_parameters": (["x"], ["weight"]),
    "exclude_modules": (".*", ["q_proj"]),
    "no_such_option": (1,),
    "inference_mode": (False,),
    "eva_config": ({"rho": 1},),
    "loftq_config": ({"loftq_bits": 4},),
    "runtime_config": ({"ephemeral_gpu_offload": True},),
    "peft_version": ("0.0.1", "99", None),
    "lora_bias": (True,),
    "lora_dropout": (0.5, 2.0, -1.0),
    "alora_invocation_tokens": ([1, 2], []),
    "arrow_config": ({},),
}


def mutate_adapter(rng: Random, folder: Path) -> tuple[str, bool]:
    """Change an adapter folder; what was done, and whether its weights are finite still."""
    kind = rng.choices(
        ["settings", "peft", "json", "header", "floats", "contents", "names"], [4, 5, 3, 5, 3, 3, 3]
    )[0]
    weights = [folder / "streams.safetensors", folder / "adapter_model.safetensors"]
    if kind in ("settings", "json"):
        file = folder / ("streams.json" if kind == "settings" else "adapter_config.json")
        data, done = json_values.mutate(rng, json.loads(file.read_text("utf-8")))
        file.write_bytes(data)
        return f"{file.name}: {done}", True
    if kind == "peft":
        file = folder / "adapter_config.json"
        document = json.loads(file.read_text("utf-8"))
        keys = rng.sample(list(PEFT), rng.choice([1, 1, 2]))
        for key in keys:
            document[key] = rng.choice(PEFT[key])
        file.write_text(json.dumps(document), "utf-8")
        return f"peft {', '.join(f'{key}={str(document[key])[:30]}' for key in keys)}", True
    if kind == "header":
        return mutate_header(rng, rng.choice(weights)), True
    if kind == "floats":
        return put_extremes(rng, rng.choice(weights)), False
    if kind == "contents":
        return rng.choice(files.CONTENT)(rng, rng.choice(files.listed(folder))), True
    return rng.choice(files.FOLDER)(rng, folder), True


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes behind it."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def mutate_header(rng: Random, file: Path) -> str:
    """Another header: offsets, shapes, types, names or its own length."""
    header, body = read_header(file)
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    kind = rng.choice(
        ["dtype", "shape", "offsets", "drop", "name", "json", "length", "metadata", "transpose"]
    )
    if kind == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif kind == "shape":
        entry["shape"] = rng.choice(
            [[], [0], [2**62, 4], [2**31, 2**31], [-1], [1e9], [*entry["shape"], 1], [10**30], "x"]
        )
    elif kind == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            [
                [end, begin],
                [0, end],
                [begin, 2**63],
                [-1, end],
                [begin, end + 1],
                [begin],
                [2**64, 2**65],
            ]
        )
    elif kind == "drop":
        del header[rng.choice(names)]
    elif kind == "name":
        header[rng.choice(["x", "", "identifiers\n", "../x", rng.choice(names)])] = header.pop(
            rng.choice(names)
        )
    elif kind == "transpose":
        entry["shape"] = entry["shape"][::-1]
    elif kind == "metadata":
        header["__metadata__"] = rng.choice(
            [{"format": "tf"}, {}, [], {"format": 1}, {"a": "x" * 10**6}]
        )
    text = json.dumps(header).encode()
    if kind == "json":
        text, _ = json_values.mutate(rng, header)
    size = (
        rng.choice([0, 1, len(text) + 1, 2**40, 2**63, 2**64 - 1, 100_000_001])
        if kind == "length"
        else len(text)
    )
    file.write_bytes(size.to_bytes(8, "little") + text + body)
    return f"header {kind} of {file.name}"


def put_extremes(rng: Random, file: Path) -> str:
    """NaN or an infinity in a weight."""
    header, body = read_header(file)
    data = bytearray(body)
    name = rng.choice(
        [
            name
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in FLOATS
        ]
    )
    begin, end = header[name]["data_offsets"]
    word = rng.choice(FLOATS[header[name]["dtype"]])
    at = begin + len(word) * rng.randrange((end - begin) // len(word))
    data[at : at + len(word)] = word
    file.write_bytes(file.read_bytes()[: -len(body)] + data)
    return f"{word.hex()} in {name} of {file.name}"
