"""What can be known of an app before weights are loaded: whether its model can be built, and its prompts fit."""

from __future__ import annotations

from ssdevice.export.plan import ExportPlan
from ssdevice.text.tokenizer import check_instruction


def check_app(plan: ExportPlan) -> None:
    """Raise InputError if the first app of a plan could not be loaded, or would have no room for a prompt."""
    from ssdevice.model.loading import load

    g, app = plan.geometry, plan.apps[0]
    load(plan.folder, app.folder, g.context, g.gamma or None, plan.merged, identity=plan.identity, values=False)
    check_instruction(plan.tokenizer, app.name, app.instruction, g.context)
