"""The roles of weights, taken from the model object, so that no pass has to parse names.

Only weights that are stored otherwise than the linears of the layers have one.
"""

from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from ssdevice.adapters.slots import SlotKind
from ssdevice.model.lora import LoraLinear
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import LowRank


class Part(Enum):
    """The part of the model that a weight belongs to.

    A head that is tied to the embedding counts as the embedding.
    """

    EMBEDDING = auto()
    HEAD = auto()
    FACTOR = auto()


@dataclass(frozen=True)
class Role:
    """The role of a weight.

    For a factor of a low-rank term: its ``kind``, the term's name in the adapter folder
    (``source``), whether it is the second factor (``up``), and whether it belongs to the streams
    themselves (``own``, see ``Streams.own_terms``).
    """

    part: Part
    kind: SlotKind = SlotKind.LORA
    source: str = ""
    up: bool = False
    own: bool = False


def low_rank_terms(model: StreamModel) -> dict[LowRank, tuple[SlotKind, str]]:
    """Every low-rank term of an app with its kind and its name in the adapter folder."""
    terms = dict[LowRank, tuple[SlotKind, str]]()
    path = model.backbone.family.layers_path
    for name, part in model.backbone.layers.named_modules():
        if isinstance(part, LoraLinear):
            terms[part.adapter] = (SlotKind.LORA, f"{path}.{name}")
    if model.streams is not None:
        for name, part in model.streams.named_modules():
            if isinstance(part, LowRank):
                terms[part] = (SlotKind.STREAM, name)
    return terms


def roles_of(form: nn.Module) -> dict[str, Role]:
    """The roles of a form's embedding, heads and factors.

    They go by the names of the weights in the form, which its traced graphs keep.
    """
    model = next(part for part in form.modules() if isinstance(part, StreamModel))
    backbone = model.backbone
    heads = [head for head in (backbone.lm_head, model.draft_head) if head is not None]
    known = {id(weight): Role(Part.HEAD) for head in heads for weight in head.parameters()}
    for weight in backbone.embed_tokens.parameters():
        known[id(weight)] = Role(Part.EMBEDDING)
    streams_own = model.streams.own_terms() if model.streams is not None else []
    for term, (kind, source) in low_rank_terms(model).items():
        own = term in streams_own
        known[id(term.down.weight)] = Role(Part.FACTOR, kind, source, own=own)
        known[id(term.up.weight)] = Role(Part.FACTOR, kind, source, up=True, own=own)
    names = form.named_parameters(remove_duplicate=False)
    return {name: known[id(tensor)] for name, tensor in names if id(tensor) in known}
