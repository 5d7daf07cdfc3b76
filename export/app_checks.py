"""What can be known of an app before weights are loaded: whether its model can be built, and its prompts fit."""

from __future__ import annotations

from ssdevice.errors import ConfigError, InputError
from ssdevice.export.plan import ExportPlan


def check_app(plan: ExportPlan) -> None:
    """Raise InputError if the first app of a plan could not be loaded, or would have no room for a prompt."""
    from ssdevice.model.loading import load

    g, app = plan.geometry, plan.apps[0]
    load(plan.folder, app.folder, g.context, g.gamma or None, plan.merged, identity=plan.identity, values=False)
    ids = plan.tokenizer.prompt_ids("a", instruction=app.instruction)
    if len(ids) >= g.context:
        what = f"the instruction of app {app.name!r} and the chat template" if app.instruction else "the chat template"
        raise ConfigError(f"--context {g.context}: {what} take {len(ids)} tokens, which leaves no room for an answer")
    if max(ids) >= g.vocab:
        raise InputError(f"{plan.folder}: a prompt has the token {max(ids)}, the model has only {g.vocab}")
