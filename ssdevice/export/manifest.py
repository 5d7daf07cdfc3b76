"""The manifest of an export, and whether there can be one for a plan."""

from collections.abc import Mapping
from importlib.metadata import version

from ssdevice import __version__
from ssdevice.bundle.manifest import AdapterKind, CacheDtype, Manifest, ModelIdentity
from ssdevice.contract import CacheForm
from ssdevice.errors import ConfigError
from ssdevice.export.calibration.calibrate import calibrated_rows, calibration_notes
from ssdevice.export.exporter import TargetResult
from ssdevice.export.plan import ExportPlan
from ssdevice.text.chat_template import PLAIN_PROMPT


def make_manifest(plan: ExportPlan, result: TargetResult, parity: Mapping[str, float]) -> Manifest:
    """The bundle's manifest, without ``files`` and ``roles``, which the writer fills."""
    identity = plan.identity
    chat = plan.tokenizer.chat
    streams = plan.settings.streams if plan.settings is not None else None
    apps = tuple(
        app.entry(app.name, identity.sha256, AdapterKind.MERGED)
        if plan.merged
        else result.apps[app.name]
        for app in plan.apps
    )
    plain = PLAIN_PROMPT if plan.tokenizer.plain else None
    notes = (plain, chat.note, *plan.notes, *calibration_notes(plan), *result.notes)
    return Manifest(
        tools={"ssdevice": __version__, **{name: version(name) for name in result.tools}},
        model=ModelIdentity(parameters=sum(plan.parameters.values()), **vars(identity)),
        target=plan.options.target,
        precision=plan.options.quant,
        mode=streams.mode if streams is not None else None,
        schedule=plan.schedule,
        cache=result.cache,
        cache_dtype=CacheDtype(result.cache_dtype),
        geometry=plan.geometry,
        msa_layers=streams.msa_layers if streams is not None else 0,
        functions=tuple(plan.functions(result.cache, result.cache_dtype).values()),
        chat=chat,
        apps=apps,
        default_app=apps[0].name,
        calibrated_rows=calibrated_rows(plan),
        sampling=plan.sampling,
        notes=tuple(filter(None, notes)),
        parity=dict(parity),
    )


def check_manifest(plan: ExportPlan) -> None:
    """Raise ConfigError for a plan with more than a manifest may hold, such as 257 apps.

    The same rules apply when the bundle is written, hours later for a large model.
    """
    try:
        apps = {
            app.name: app.entry(app.name, plan.identity.sha256, AdapterKind.FUNCTION)
            for app in plan.apps
        }
        written = TargetResult({}, CacheForm.INTERNAL, CacheDtype.FP32, apps=apps)
        make_manifest(plan, written, {})
    except ConfigError as error:
        raise ConfigError(f"no bundle can hold this: {error}") from error
