"""What can be known of an app before weights are loaded: whether its model can be built, and its prompts fit."""

from __future__ import annotations

from ssdevice.adapters.slots import SlotKind
from ssdevice.adapters.weights import AdapterWeights
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.plan import ExportPlan
from ssdevice.text.tokenizer import check_instruction


def check_app(plan: ExportPlan) -> None:
    """Raise InputError if the first app of a plan could not be loaded, or would have no room for a prompt."""
    from ssdevice.model.loading import load

    g, app = plan.geometry, plan.apps[0]
    load(plan.folder, app.folder, g.context, g.gamma or None, plan.merged, identity=plan.identity, values=False)
    check_instruction(plan.tokenizer, app.name, app.instruction, g.context)


def check_slots(plan: ExportPlan) -> None:
    """Raise InputError if slots beside the linears of the layers could not hold an app's LoRA."""
    from ssdevice.model.families import family_of

    layers = f"{family_of(plan.identity.model_type).layers_path}."
    for app in plan.apps:
        if app.folder is None or not app.has_lora:
            continue
        for kind, name in AdapterWeights.read(app.folder).factors:
            if kind is SlotKind.LORA and not name.startswith(layers):
                raise UnsupportedModelError(
                    f"{app.folder}: its LoRA changes {name}, slots are for linears of layers: export this app by itself"
                )
