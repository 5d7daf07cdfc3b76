"""What every weight of a function is, told from the model object once: no pass over a graph reads it out of a name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from torch import nn

from ssdevice.adapters.slots import SlotKind
from ssdevice.model.lora import LoraLinear
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank


class Part(Enum):
    """Where in the model a weight belongs; a head that is tied to the embedding counts as the embedding."""

    EMBEDDING = auto()
    POSITIONS = auto()
    LAYERS = auto()
    HEAD = auto()
    FACTOR = auto()


@dataclass(frozen=True)
class Role:
    """The part a weight belongs to. Of a factor of a low-rank term also whose it is (``kind``), the term's name in the
    adapter folder (``source``), and whether it is the second of the two (``up``).

    ``permuted``: a graph holds its outputs by heads in another order than the model.
    """

    part: Part
    kind: SlotKind = SlotKind.LORA
    source: str = ""
    up: bool = False
    permuted: bool = False


def low_rank_terms(model: StreamModel) -> dict[nn.Module, tuple[SlotKind, str]]:
    """Every low-rank term of an app, with its name in the adapter folder: PEFT's for a LoRA, the streams' own else."""
    found: dict[nn.Module, tuple[SlotKind, str]] = {}
    backbone = model.backbone
    for name, part in backbone.layers.named_modules():
        if isinstance(part, LoraLinear):
            found[part.adapter] = SlotKind.LORA, f"{backbone.family.layers_path}.{name}"
    if model.streams is not None:
        for name, part in model.streams.named_modules():
            if isinstance(part, LowRank):
                found[part] = SlotKind.STREAM, name
    return found


def roles_of(form: nn.Module) -> dict[str, Role]:
    """The roles of a form's weights and tables by the names they have in it, and so in what is traced of it."""
    model = next(part for part in form.modules() if isinstance(part, StreamModel))
    backbone = model.backbone
    tables = chain(*backbone.rope_tables().values(), (v for n, v in backbone.named_buffers() if n == "position_table"))
    known = {id(weight): Role(Part.LAYERS) for weight in backbone.layers.parameters()}
    known |= {id(table): Role(Part.POSITIONS) for table in tables}
    known |= {id(weight): Role(Part.HEAD) for weight in backbone.lm_head.parameters()}
    if model.draft_head is not None:
        known |= {id(weight): Role(Part.HEAD) for weight in model.draft_head.parameters()}
    known |= {id(weight): Role(Part.EMBEDDING) for weight in backbone.embed_tokens.parameters()}
    for term, (kind, source) in low_rank_terms(model).items():
        assert isinstance(term, LowRank)
        known[id(term.down.weight)] = Role(Part.FACTOR, kind, source)
        known[id(term.up.weight)] = Role(Part.FACTOR, kind, source, up=True)
    names = chain(form.named_parameters(remove_duplicate=False), form.named_buffers(remove_duplicate=False))
    return {name: known[id(tensor)] for name, tensor in names if id(tensor) in known}
