"""An adapter folder's weights as the tensors that a bundle's slots take. Needs only NumPy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.adapters.lora_options import check_options
from ssdevice.adapters.safetensors_file import read_floats
from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS, SETTINGS, WEIGHTS, AdapterSettings, read_settings
from ssdevice.adapters.slots import IDENTIFIERS, ProgramLayout, Slot, SlotKind, SlotPart, Variant
from ssdevice.config import Mode, read_json
from ssdevice.errors import ConfigError, InputError

Array = NDArray[Any]
LEVELS = 127.0
"""Largest code of an int8 weight."""
PAIR_LEVELS = 127.5
"""Largest sum, before rounding, of the codes of two neighbours that a kernel adds up in 16 bits; 128 after it."""
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Factors:
    """``down [r, inputs]`` and ``up [outputs, r]`` of one linear, all scaling in ``up``."""

    down: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True)
class AdapterWeights:
    """What an adapter folder brings. ``factors``: by kind and name; ``identifiers [γ, hidden]``: with streams."""

    folder: Path
    settings: AdapterSettings | None
    has_lora: bool
    identifiers: NDArray[np.float32] | None = None
    factors: dict[tuple[SlotKind, str], Factors] = field(default_factory=dict)

    @property
    def lora_rank(self) -> int:
        """The largest rank of its LoRA; 0 without."""
        return max((len(f.down) for (kind, _), f in self.factors.items() if kind is SlotKind.LORA), default=0)

    @property
    def variant(self) -> Variant:
        """The graphs it needs."""
        return Variant.of(self.settings.streams if self.settings is not None else None, self.has_lora)

    @classmethod
    def read(cls, folder: Path) -> AdapterWeights:
        """The weights in a folder; raises InputError for what is no adapter or cannot stand in slots."""
        if not folder.is_dir():
            raise InputError(f"adapter {folder}: no such folder")
        has_streams, has_lora = (folder / SETTINGS).is_file(), (folder / PEFT_CONFIG).is_file()
        if not has_streams and not has_lora:
            raise InputError(f"{folder}: neither {SETTINGS} nor {PEFT_CONFIG}; expected an adapter folder")
        settings = read_settings(folder) if has_streams else None
        if settings is not None and settings.streams.mode is Mode.LOSSLESS and has_lora:
            raise InputError(f"{folder}: a lossless adapter leaves main rows alone but has a {PEFT_CONFIG}")
        Variant.of(settings.streams if settings is not None else None, has_lora)  # refuses what slots cannot hold
        factors = _read_lora(folder) if has_lora else {}
        identifiers = None
        if has_streams:
            tensors = _finite(folder / WEIGHTS)
            identifiers = tensors.pop("identifiers", None)
            if identifiers is None:
                raise InputError(f"{folder / WEIGHTS}: tensor 'identifiers' is missing")
            pairs = _pairs(folder / WEIGHTS, tensors, ".down.weight", ".up.weight")
            factors |= {(SlotKind.STREAM, name): Factors(*pair) for name, pair in pairs.items()}
        return cls(folder, settings, has_lora, identifiers, factors)


def fill(weights: AdapterWeights, variant: Variant, gamma: int, hidden: int) -> dict[str, Array]:
    """The tensors of a variant's slots by graph input; linears without factors get rank 0.

    ``gamma``: streams the bundle runs. Raises InputError for factors of another shape or without a slot.
    """
    waiting = dict(weights.factors)
    tensors: dict[str, Array] = {}
    for slot in variant.slots:
        tensors |= _slot_tensors(weights.folder, slot, waiting)
    if waiting:
        kind, name = next(iter(waiting))
        raise InputError(
            f"{weights.folder}: the bundle has no {kind} slot for {name!r}; slots are for linears of layers"
        )
    if variant.mode is not None:
        found = weights.identifiers
        if found is None or found.ndim != 2 or len(found) < gamma or found.shape[1] != hidden:
            shape = None if found is None else list(found.shape)
            raise InputError(f"{weights.folder}: identifiers have shape {shape}, the bundle needs [{gamma}, {hidden}]")
        tensors[IDENTIFIERS] = np.ascontiguousarray(found[:gamma])
    return tensors


def fill_program(weights: AdapterWeights, layout: ProgramLayout, gamma: int) -> dict[str, NDArray[np.float32]]:
    """An app's tensors by state of the program; smaller ranks, and slots without factors, are filled up with zeros.

    ``gamma``: streams the program runs. Raises InputError for factors of another shape or without a slot.
    """
    waiting = dict(weights.factors)
    tensors: dict[str, NDArray[np.float32]] = {}
    for slot in layout.slots:
        down = np.zeros((1, slot.inputs, slot.rank), np.float32)
        up = np.zeros((1, slot.rank, slot.outputs), np.float32)
        factors = waiting.pop((slot.kind, slot.source), None)
        if factors is not None:
            rank = len(factors.down)
            expected = (rank, slot.inputs), (slot.outputs, rank)
            if (factors.down.shape, factors.up.shape) != expected or rank > slot.rank:
                raise InputError(
                    f"{weights.folder}: the factors of {slot.source!r} have shapes {list(factors.down.shape)} and "
                    f"{list(factors.up.shape)}, its slot takes {slot.inputs} inputs, {slot.outputs} outputs and a rank "
                    f"of at most {slot.rank}"
                )
            down[0, :, :rank], up[0, :rank] = factors.down.T, factors.up.T
        tensors |= {f"{slot.state}.down": down, f"{slot.state}.up": up}
    if waiting:
        kind, name = next(iter(waiting))
        raise InputError(f"{weights.folder}: the program has no {kind} slot for {name!r}")
    if layout.identifiers:
        identifiers = np.zeros((gamma, layout.hidden), np.float32)
        found = weights.identifiers
        if found is not None:
            if found.ndim != 2 or len(found) < gamma or found.shape[1] != layout.hidden:
                raise InputError(
                    f"{weights.folder}: identifiers have shape {list(found.shape)}, the bundle needs "
                    f"[{gamma}, {layout.hidden}]"
                )
            identifiers[:] = found[:gamma]
        tensors[layout.identifiers] = identifiers
    return tensors


def int8_columns(weight: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Nearest int8 form of ``weight [.., K, N]`` and its scales ``[.., N]``; a column of zeros gets scale 1."""
    peak = np.abs(weight).max(axis=-2, initial=0).astype(np.float32)
    scale = np.where(peak > 0, peak / np.float32(LEVELS), np.float32(1)).astype(np.float32)
    return np.clip(np.rint(weight / scale[..., None, :]), -LEVELS, LEVELS).astype(np.int8), scale


def int8_factors(weight: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Like ``int8_columns``, with scales that keep products with uint8 inputs exact on every CPU.

    x86 without VNNI multiplies inputs of 0..255 by weights two neighbours at a time and adds both products in 16 bits
    (``vpmaddubsw``), which saturate beyond 32767: codes of inputs 2i and 2i + 1 may add up to 128 at most.
    """
    peak = np.abs(weight).max(axis=-2, initial=0).astype(np.float32)
    paired = weight.shape[-2] // 2 * 2
    both = weight[..., 0:paired:2, :] + weight[..., 1:paired:2, :]  # of opposite signs they reach no further than one
    reach = np.abs(both).max(axis=-2, initial=0).astype(np.float32)
    scale = np.maximum(peak / np.float32(LEVELS), reach / np.float32(PAIR_LEVELS))
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    return np.clip(np.rint(weight / scale[..., None, :]), -LEVELS, LEVELS).astype(np.int8), scale


def _slot_tensors(folder: Path, slot: Slot, waiting: dict[tuple[SlotKind, str], Factors]) -> dict[str, Array]:
    downs = []
    tensors: dict[str, Array] = {}
    for part, spec in zip(slot.parts, slot.ups, strict=True):
        factors = waiting.pop((slot.kind, part.source), None) if part.source else None
        if factors is None:
            factors = Factors(np.zeros((0, slot.inputs), np.float32), np.zeros((part.outputs, 0), np.float32))
        downs.append(_checked(folder, slot, part, factors).down.T)
        tensors[spec.name] = np.ascontiguousarray(_by_heads(part, factors.up).T)
    if len(slot.parts) > 1:
        tensors[slot.ranks.name] = np.array([down.shape[1] for down in downs], np.int64)
    down = np.ascontiguousarray(np.concatenate(downs, axis=1))
    if not slot.int8:
        return {slot.down.name: down, **tensors}
    values, scale = int8_factors(down)
    return {slot.down.name: values, slot.down_scale.name: scale, **tensors}


def _checked(folder: Path, slot: Slot, part: SlotPart, factors: Factors) -> Factors:
    rank = len(factors.down)
    for found, expected in ((factors.down, (rank, slot.inputs)), (factors.up, (part.outputs, rank))):
        if found.shape != expected:
            raise InputError(
                f"{folder}: a factor of {part.source!r} has shape {list(found.shape)}, expected {list(expected)}"
            )
    return factors


def _by_heads(part: SlotPart, up: Array) -> Array:
    """Rows of ``up`` in the order the graph holds the linear's outputs in."""
    if not part.heads:
        return up
    return up.reshape(*part.heads, up.shape[1]).swapaxes(0, 1).reshape(up.shape)


def _read_lora(folder: Path) -> dict[tuple[SlotKind, str], Factors]:
    config = read_json(folder / PEFT_CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError(f"{folder / PEFT_CONFIG}: peft_type is not LORA; only LoRA can stand in a slot")
    check_options(folder, config, apart=True)
    file = folder / PEFT_WEIGHTS
    factors = {}
    for name, (down, up) in _pairs(file, _finite(file), ".lora_A.weight", ".lora_B.weight").items():
        if not name.startswith(PEFT_PREFIX):
            raise InputError(f"{file}: {name!r} does not begin with {PEFT_PREFIX!r}, as PEFT's names do")
        module = name.removeprefix(PEFT_PREFIX)
        factors[SlotKind.LORA, module] = Factors(down, up * _scaling(folder, config, module, len(down)))
    return factors


def _scaling(folder: Path, config: Mapping[str, Any], module: str, found: int) -> np.float32:
    """PEFT's factor for one linear, which its patterns may give a rank and alpha of their own."""
    try:
        rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
        alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ZeroDivisionError, ValueError, re.error) as error:
        raise ConfigError(f"{folder / PEFT_CONFIG}: r, lora_alpha or a pattern cannot be used ({error})") from error
    if rank != found:
        raise InputError(f"{folder}: {module} has rank {found}, {PEFT_CONFIG} says {rank}")
    return np.float32(scaling)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _finite(file: Path) -> dict[str, NDArray[np.float32]]:
    tensors = read_floats(file)
    for name, value in tensors.items():
        if not np.isfinite(value).all():
            raise InputError(f"{file}: tensor {name!r} has values that are not finite")
    return tensors


def _pairs(
    file: Path, tensors: Mapping[str, Array], down: str, up: str
) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    found = {}
    names = [name.removesuffix(suffix) for name in tensors for suffix in (down, up) if name.endswith(suffix)]
    for name in dict.fromkeys(names):
        pair = tensors.get(name + down), tensors.get(name + up)
        if pair[0] is None or pair[1] is None:
            raise InputError(f"{file}: {name!r} has only one of its factors")
        if pair[0].ndim != 2 or pair[1].ndim != 2 or len(pair[0]) != pair[1].shape[1]:
            raise InputError(
                f"{file}: the factors of {name!r} have shapes {list(pair[0].shape)}, {list(pair[1].shape)}"
            )
        found[name] = (pair[0], pair[1])
    others = tensors.keys() - {name + suffix for name in found for suffix in (down, up)}
    if others:
        raise InputError(f"{file}: unexpected tensor {sorted(others)[0]!r}; only factors of linears stand in slots")
    return found
