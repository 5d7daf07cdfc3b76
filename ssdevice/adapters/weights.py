"""The weights in an adapter folder: accepted LoRA options, and tensors for a bundle's slots."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS, WEIGHTS, AdapterFolder
from ssdevice.adapters.slots import Slot, SlotKind, Variant
from ssdevice.adapters.storage import Array, Floats, int8_factors, read_floats
from ssdevice.config import read_json
from ssdevice.errors import ConfigError, InputError, UnsupportedModelError

PEFT_PREFIX = "base_model.model."
TOKEN = SlotKind.STREAM, "token"
"""The factors of g (``StreamConfig.token_rank``), which has outputs for every stream."""
PLAIN = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "bias",
        "use_rslora",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
"""Options that are accepted with any value, except for ``bias`` and ``init_lora_weights``."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""``init_lora_weights`` that leave the base as it is; others subtract initial factors from it."""
MERGED = frozenset(
    {
        "use_dora",
        "modules_to_save",
        "trainable_token_indices",
        "target_parameters",
        "lora_bias",
        "fan_in_fan_out",
        "use_qalora",
        "alora_invocation_tokens",
        "arrow_config",
        "monteclora_config",
        "kasa_config",
        "use_bdlora",
        "velora_config",
        "megatron_config",
    }
)
"""Options that only PEFT can apply, or refuse, when it merges."""
RANDOM_START = "pissa_niter_"
"""Prefix of ``init_lora_weights`` that change the base by a random, unrepeatable approximation."""


def check_options(folder: Path, config: Mapping[str, Any], apart: bool) -> None:
    """Raise InputError for an option in ``adapter_config.json`` that would be ignored.

    ``apart``: the LoRA stays separate from the base. Only its two factors and their scaling are
    kept then, so any other effect would be lost silently; PEFT itself handles the rest when it
    merges.
    """
    if config.get("layer_replication"):
        raise InputError(f"{folder}: layer_replication changes the base model; it is not supported")
    start = config.get("init_lora_weights", True)
    if str(start).startswith(RANDOM_START):
        raise InputError(
            f"{folder}: init_lora_weights={str(start)[:40]!r} changes the base at random; "
            "convert it to a plain LoRA"
        )
    for option, value in config.items():
        if value and option not in PLAIN | MERGED | {"layer_replication"}:
            raise InputError(
                f"{folder}: this version does not know the LoRA option {option[:60]!r}"
            )
    if apart:
        _check_plain(folder, config)


def _check_plain(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for the first option that only PEFT can apply."""
    wanted = [option for option in sorted(MERGED) if config.get(option)]
    if config.get("bias", "none") != "none":
        wanted.append(f"bias={str(config['bias'])[:40]!r}")
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        wanted.append(f"init_lora_weights={str(start)[:40]!r}")
    if wanted:
        raise UnsupportedModelError(
            f"{folder}: {wanted[0]} does not fit into a slot of a shared base; "
            "export this app by itself"
        )


@dataclass(frozen=True)
class Factors:
    """``down [r, inputs]`` and ``up [outputs, r]`` of one linear; ``up`` includes the scaling."""

    down: Floats
    up: Floats


@dataclass(frozen=True)
class AdapterWeights(AdapterFolder):
    """An adapter folder and its weights.

    ``factors``: by kind and name; ``identifiers [γ, hidden]``: with streams.
    """

    identifiers: Floats | None = None
    factors: dict[tuple[SlotKind, str], Factors] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The weights in a folder.

        Raises InputError if it is not an adapter or does not fit into slots.
        """
        opened = AdapterFolder.open(folder)
        opened.check_apart()
        _ = opened.variant  # raises if slots cannot hold it
        factors = _read_lora(folder) if opened.has_lora else {}
        identifiers = None
        if opened.settings is not None:
            tensors = read_floats(folder / WEIGHTS)
            identifiers = tensors.pop("identifiers", None)
            if identifiers is None:
                raise InputError(f"{folder / WEIGHTS}: tensor 'identifiers' is missing")
            found = _factors(folder / WEIGHTS, tensors, ".down.weight", ".up.weight")
            factors |= {(SlotKind.STREAM, name): pair for name, pair in found.items()}
        return cls(folder, opened.settings, opened.has_lora, identifiers, factors)


def fill(weights: AdapterWeights, variant: Variant, gamma: int, hidden: int) -> dict[str, Array]:
    """The tensors of a variant's slots by name.

    Linears without factors get rank 0, or zeros where the rank is fixed. ``gamma``: number of
    streams in the bundle. Raises InputError for factors with a wrong shape or without a slot.
    """
    folder = weights.folder
    waiting = dict(weights.factors)  # those without a slot yet
    g = waiting.get(TOKEN)
    if g is not None:
        waiting[TOKEN] = Factors(g.down, g.up[: gamma * hidden])
    tensors: dict[str, Array] = {}
    for slot in variant.slots:
        tensors |= _slot_tensors(folder, slot, waiting)
    for kind, name in waiting:
        raise InputError(
            f"{folder}: the bundle has no {kind} slot for {name!r}; slots are for linears of layers"
        )
    if variant.streams is not None:
        tensors[variant.identifiers] = np.ascontiguousarray(_identifiers(weights, gamma, hidden))
    elif variant.identifiers:
        tensors[variant.identifiers] = np.zeros((gamma, hidden), np.float32)
    return tensors


def _identifiers(weights: AdapterWeights, gamma: int, hidden: int) -> Floats:
    """The first γ stream identifiers ``[γ, hidden]``.

    Raises InputError if the adapter has none of this shape.
    """
    found = weights.identifiers
    if found is None or found.ndim != 2 or len(found) < gamma or found.shape[1] != hidden:
        shape = None if found is None else list(found.shape)
        raise InputError(
            f"{weights.folder}: identifiers have shape {shape}, "
            f"the bundle needs [{gamma}, {hidden}]"
        )
    return found[:gamma]


def _slot_tensors(
    folder: Path, slot: Slot, waiting: dict[tuple[SlotKind, str], Factors]
) -> dict[str, Array]:
    """The tensors of one slot by name; what they are made from is taken out of ``waiting``."""
    downs = list[Array]()
    ups = dict[str, Array]()
    for source, outputs, spec in zip(slot.sources, slot.outputs, slot.ups, strict=True):
        factors = waiting.pop((slot.kind, source), None) if source else None
        if factors is None:
            no_down = np.zeros((0, slot.inputs), np.float32)
            no_up = np.zeros((outputs, 0), np.float32)
            factors = Factors(no_down, no_up)
        rank = len(factors.down)
        fits = factors.down.shape == (rank, slot.inputs) and factors.up.shape == (outputs, rank)
        if not fits or 0 < slot.rank < rank:
            limit = f" and a rank of at most {slot.rank}" if slot.rank else ""
            raise InputError(
                f"{folder}: the factors of {source!r} have shapes {list(factors.down.shape)} and "
                f"{list(factors.up.shape)}, its slot takes {slot.inputs} inputs, "
                f"{outputs} outputs{limit}"
            )
        padding = (0, max(slot.rank - rank, 0)), (0, 0)
        downs.append(np.pad(factors.down, padding).T)
        ups[spec.name] = np.ascontiguousarray(np.pad(factors.up.T, padding))
    down = np.ascontiguousarray(np.concatenate(downs, axis=1))
    tensors = dict[str, Array]()
    if slot.state:
        tensors[slot.down.name] = down[None]
        for name, up in ups.items():
            tensors[name] = up[None]
        return tensors
    if slot.int8:
        values, scale = int8_factors(down)
        tensors[slot.down.name] = values
        tensors[slot.down_scale.name] = scale
    else:
        tensors[slot.down.name] = down
    tensors |= ups
    if len(downs) > 1:
        ranks = [part.shape[1] for part in downs]
        tensors[slot.ranks.name] = np.array(ranks, np.int64)
    return tensors


def _read_lora(folder: Path) -> dict[tuple[SlotKind, str], Factors]:
    """The factors of a LoRA by kind and name; raises InputError or ConfigError."""
    config = read_json(folder / PEFT_CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError(
            f"{folder / PEFT_CONFIG}: peft_type is not LORA; only a LoRA fits into slots"
        )
    check_options(folder, config, apart=True)
    file = folder / PEFT_WEIGHTS
    pairs = _factors(file, read_floats(file), ".lora_A.weight", ".lora_B.weight")
    factors = {}
    for name, found in pairs.items():
        if not name.startswith(PEFT_PREFIX):
            raise InputError(
                f"{file}: {name!r} does not begin with {PEFT_PREFIX!r}, as PEFT's names do"
            )
        module = name.removeprefix(PEFT_PREFIX)
        scaling = _scaling(folder, config, module, len(found.down))
        factors[SlotKind.LORA, module] = Factors(found.down, found.up * scaling)
    return factors


def _scaling(folder: Path, config: Mapping[str, Any], module: str, found: int) -> np.float32:
    """PEFT's scaling of one linear, whose rank and alpha may come from patterns."""
    try:
        rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ZeroDivisionError, ValueError, re.error) as error:
        raise ConfigError(
            f"{folder / PEFT_CONFIG}: r, lora_alpha or a pattern cannot be used ({error})"
        ) from error
    if rank != found:
        raise InputError(f"{folder}: {module} has rank {found}, {PEFT_CONFIG} says {rank}")
    return np.float32(scaling)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a linear's name, as in PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _factors(file: Path, tensors: Mapping[str, Array], down: str, up: str) -> dict[str, Factors]:
    """The pairs of factors in a file by name, ``down`` and ``up`` being the ends of their names.

    Raises InputError for any other tensor.
    """
    found = {}
    names = dict[str, None]()  # in the order of the file, each once
    others = list[str]()
    for name in tensors:
        if name.endswith((down, up)):
            names[name.removesuffix(down).removesuffix(up)] = None
        else:
            others.append(name)
    for name in names:
        first = tensors.get(name + down)
        second = tensors.get(name + up)
        if first is None or second is None:
            raise InputError(f"{file}: {name!r} has only one of its factors")
        if first.ndim != 2 or second.ndim != 2 or len(first) != second.shape[1]:
            raise InputError(
                f"{file}: the factors of {name!r} have shapes {list(first.shape)}, "
                f"{list(second.shape)}"
            )
        found[name] = Factors(first, second)
    if others:
        raise InputError(
            f"{file}: unexpected tensor {min(others)!r}; slots take only factors of linears: "
            "export this app by itself"
        )
    return found
