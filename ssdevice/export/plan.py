"""The options and the plan of an export."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ssdevice import contract
from ssdevice.adapters.settings import Adapter, AdapterFolder, BaseIdentity
from ssdevice.adapters.storage import PRECISIONS
from ssdevice.bundle.manifest import LONGER, NAME, Precision
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.config import Schedule
from ssdevice.contract import CacheForm, FunctionSpec, Geometry
from ssdevice.errors import ConfigError, InputError
from ssdevice.export.target import TargetOptions, export_target
from ssdevice.rules import check_rule, repeated_name
from ssdevice.tree import Tree

if TYPE_CHECKING:
    from ssdevice.adapters.settings import AdapterSettings
    from ssdevice.data import Example
    from ssdevice.export.exporter import Exporter
    from ssdevice.text.tokenizer import ChatTokenizer

Chosen = TypeVar("Chosen", bound=TargetOptions)
BASE_APP = "base"
"""Name of the app that is the base without an adapter."""
INT8_HEAD = "embedding and head are int8 per token: four bits cost most accuracy there"
"""The note in an int4 bundle of a target that stores these in int8."""
DEFAULT_CONTEXT = 512
MAX_CHUNK = 512
Quant = Precision
"""The values of ``--quant`` are the manifest's precisions."""


@dataclass(frozen=True)
class ExportOptions:
    """The options of an export; None is the default of the target or the adapter.

    ``model``: Hugging Face folder or hub id. ``adapters``: (app name, adapter folder). ``tree``:
    the draft tree, by default the chain of all streams; without streams, of the drafts that repeat
    the text. ``context``: tokens that a conversation may hold. ``chunk``: prompt tokens per
    prefill. ``slots``: keep even a single adapter separate from the base, so that apps can be added
    and switched. ``adapter_precision``: how separate adapters store their floats, see
    ``ssdevice.adapters.storage``. ``calibrate``: data files of the apps, with whose rows weights
    are rounded instead of to nearest. ``own_text``: where there are none, with text that the model
    writes. ``phrases``: files with the model's own answers, or one with
    the table made of them: what it says often is drafted without streams. ``choose``: with
    functions for a host that chooses tokens. ``cross_check``: compare with transformers and PEFT
    before graphs are written. ``target_options``: options of some targets only, at most one of each
    kind; see ``chosen``.
    """

    model: str
    target: str
    quant: Quant
    out: Path
    adapters: tuple[tuple[str, Path], ...] = ()
    tree: Tree | None = None
    schedule: Schedule | None = None
    context: int = DEFAULT_CONTEXT
    chunk: int | None = None
    target_options: tuple[TargetOptions, ...] = ()
    slots: bool = False
    adapter_precision: Quant = Quant.FP32
    calibrate: tuple[Path, ...] = ()
    own_text: bool = True
    phrases: tuple[Path, ...] = ()
    choose: bool = False
    cross_check: bool = True
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.chunk is not None and not 1 <= self.chunk <= MAX_CHUNK:
            raise ConfigError(f"--chunk is {self.chunk}, expected 1 to {MAX_CHUNK}")
        if self.adapter_precision not in PRECISIONS:
            raise ConfigError(
                f"--adapter-precision is {self.adapter_precision}, expected {', '.join(PRECISIONS)}"
            )
        export_target(self.target).check(self)

    def chosen(self, kind: type[Chosen]) -> Chosen:
        """The options of this kind, with their defaults if none were given."""
        return next((one for one in self.target_options if isinstance(one, kind)), kind())

    @property
    def form(self) -> str:
        """The target's name in folders and messages."""
        return export_target(self.target).form(self.target_options)


@dataclass(frozen=True)
class AppPlan(Adapter):
    """One app of an export."""

    name: str


@dataclass(frozen=True)
class ExportPlan:
    """Everything about an export that is known before weights are loaded.

    ``apps``: at least one. ``merged``: the LoRA of the only app is in the weights; otherwise apps
    are separate. ``geometry``: the bundle's, with one tree for all apps. ``parameters``: elements
    of the base's weights by stored tensor name; ``bits``: of each on disk. ``tokenizer``: that of
    all apps, from ``tokenizer_folder``: the base's or an adapter's. ``calibration``: the rows to
    calibrate with. ``own_text``: whether the model writes them itself. ``notes``: for the manifest,
    as ``sampling`` is. ``phrases``: the table of ``options.phrases``.
    """

    options: ExportOptions
    folder: Path
    identity: BaseIdentity
    apps: tuple[AppPlan, ...]
    merged: bool
    geometry: Geometry
    schedule: Schedule
    parameters: Mapping[str, int]
    bits: float
    tokenizer: "ChatTokenizer"
    tokenizer_folder: Path
    calibration: "tuple[Example, ...]"
    own_text: bool
    notes: tuple[str, ...]
    sampling: ModelSampling | None
    phrases: bytes

    @property
    def settings(self) -> "AdapterSettings | None":
        """The settings of the first app that has streams."""
        return next((app.settings for app in self.apps if app.settings is not None), None)

    @property
    def adapter(self) -> Path | None:
        """The folder of the first app's adapter, in a merged plan that of the only one."""
        return self.apps[0].folder

    def of(self, app: AppPlan) -> Self:
        """The plan for one of the apps; beside others, one without streams has a plan of plain
        decoding.
        """
        if self.merged or app.settings is not None:
            return replace(self, apps=(app,))
        return replace(self, apps=(app,), geometry=self.geometry.plain)

    @property
    def _calibrated_with(self) -> list[str] | str | None:
        if self.own_text:
            return "text that the model writes"
        return [str(file) for file in self.options.calibrate] or None

    @property
    def calibrated_instruction(self) -> str:
        """The instruction before the rows to calibrate with: that of the only app.

        What separate apps share is calibrated without any.
        """
        return self.apps[0].instruction if self.merged else ""

    @property
    def function_names(self) -> tuple[str, ...]:
        """The contract's functions in this export."""
        names: tuple[str, ...] = contract.GREEDY if self.geometry.short else contract.FUNCTIONS
        if not self.geometry.gamma:
            names = (contract.PREFILL, contract.PLAIN)
        if not self.geometry.hidden:
            return names
        if self.geometry.gamma:
            names = (*names, contract.VERIFY)
        names = (*names, contract.VERIFY_PLAIN)
        if self.settings is not None:
            names = (*names, contract.DRAFT)
        return names

    def functions(self, cache: CacheForm, cache_dtype: str) -> dict[str, FunctionSpec]:
        """The specs of the functions in this export."""
        every = contract.functions(self.geometry, cache, cache_dtype)
        return {name: every[name] for name in self.function_names}

    def estimated_bytes(self) -> int:
        """Estimated size of the weights on disk, with scales and rotary tables, without graphs."""
        return (
            int(sum(self.parameters.values()) * self.bits / 8)
            + 4 * self.geometry.context * self.geometry.head_dim
        )

    def describe(self) -> dict[str, Any]:
        """The plan as plain JSON values, for ``--dry-run``."""
        g = self.geometry
        return {
            "model": str(self.folder),
            "family": self.identity.model_type,
            "apps": [app.name for app in self.apps if app.folder is not None],
            "merged": self.merged,
            "target": self.options.target,
            **export_target(self.options.target).describe(self.options),
            "quant": self.options.quant.value,
            "mode": self.settings.streams.mode.value if self.settings else None,
            "functions": list(self.function_names),
            "gamma": g.gamma,
            "k": g.k,
            "msa_layers": self.settings.streams.msa_layers if self.settings else None,
            "tree": g.tree.to_json(),
            "tree_size": g.tree.size,
            "schedule": self.schedule.value,
            "context": g.context,
            "chunk": g.chunk,
            "calibrate": self._calibrated_with,
            "phrases": [str(file) for file in self.options.phrases],
            "out": str(self.options.out),
            "estimated_bytes": self.estimated_bytes(),
            "notes": list(self.notes),
        }


def make_plan(options: ExportOptions, target: "Exporter") -> ExportPlan:
    """Check everything that can be checked without loading weights, so that a dry run refuses what
    an export refuses.

    Raises InputError, which names the value that cannot be used.
    """
    from ssdevice.export.calibration.calibrate import chosen_rows
    from ssdevice.export.crosscheck.check import SKIPPED
    from ssdevice.export.crosscheck.generation import check_settings, model_sampling
    from ssdevice.export.crosscheck.prompts import compare_prompts
    from ssdevice.export.phrases import read_phrases
    from ssdevice.model.loading import load_base, read_config, resolve_folder
    from ssdevice.model.stored import stored_tensors
    from ssdevice.model.tokenizer import shared_tokenizer

    merged = len(options.adapters) <= 1 and not options.slots
    _check_form(options, target, merged)
    folder = resolve_folder(options.model)
    config = read_config(folder)
    stored_tensors(folder)  # damaged headers are found before whole files are hashed
    calibration = tuple(chosen_rows(options.calibrate)) if options.calibrate else ()
    identity = BaseIdentity.of(folder, config)
    apps = _apps(options, identity, config, merged)
    geometry = _geometry(options, target, apps, merged, config)
    schedule = _schedule(options, target, apps)
    base = load_base(folder, values=False)
    tokenizer, tokenizer_folder, notes = shared_tokenizer(
        folder, [app.folder for app in apps], identity.vocab
    )
    compared: tuple[str, ...] = (SKIPPED,)
    if options.cross_check:
        compared = compare_prompts(tokenizer, tokenizer_folder)
    phrases = b""
    if options.phrases:
        instruction = apps[0].instruction
        phrases = read_phrases(options.phrases, tokenizer, instruction, identity.vocab)
    plan = ExportPlan(
        options=options,
        folder=folder,
        identity=identity,
        apps=apps,
        merged=merged,
        geometry=geometry,
        schedule=schedule,
        parameters=base.parameters,
        bits=target.bits[options.quant],
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        calibration=calibration,
        own_text=options.own_text and not calibration and options.quant in target.calibrates,
        notes=(
            *compared,
            *check_settings(tokenizer, folder, options.choose),
            *_longer(options.context, config),
            *base.notes,
            *notes,
        ),
        sampling=model_sampling(folder, identity.vocab) if options.choose else None,
        phrases=phrases,
    )
    _check_plan(plan, target)
    return plan


def _check_plan(plan: ExportPlan, target: "Exporter") -> None:
    """Raise InputError for what a later stage of the export would refuse.

    A check that a stage makes and that needs no values of weights belongs here.
    """
    from ssdevice.export.calibration.rows import tokenized
    from ssdevice.export.manifest import check_manifest
    from ssdevice.model.loading import load
    from ssdevice.text.tokenizer import check_instruction

    options = plan.options
    for app in plan.apps:
        load(
            plan.folder,
            app.folder,
            options.context,
            plan.of(app).geometry.gamma or None,
            plan.merged,
            identity=plan.identity,
            values=False,
        )
        check_instruction(plan.tokenizer, app.name, app.instruction, options.context)
    tokenized(plan.calibration, plan.tokenizer, plan.calibrated_instruction, options.context)
    target.check(plan)
    check_manifest(plan)


def _apps(
    options: ExportOptions, identity: BaseIdentity, config: Any, merged: bool
) -> tuple[AppPlan, ...]:
    """The apps of the adapters, and the base where it comes for free: alone, and beside separate
    adapters.
    """
    apps = [_app(name, adapter, identity, config, merged) for name, adapter in options.adapters]
    names = [app.name.lower() for app in apps]
    if not apps or (not merged and BASE_APP not in names):
        apps.append(AppPlan(None, None, False, BASE_APP))
    twice = repeated_name(names)
    if twice is not None:
        raise ConfigError(f"--adapter {twice}=: two apps have this name")
    return tuple(apps)


def _geometry(
    options: ExportOptions,
    target: "Exporter",
    apps: tuple[AppPlan, ...],
    merged: bool,
    config: Any,
) -> Geometry:
    """The bundle's sizes. Raises ConfigError for a tree, a chunk or a context that do not fit."""
    from ssdevice.model.loading import POSITION_MARGIN

    tree = _tree(options, apps, merged, target.repeats)
    chunk = options.chunk or target.chunk
    if chunk + tree.depth + 2 > POSITION_MARGIN:
        raise ConfigError(
            f"--chunk {chunk} and a tree of depth {tree.depth} exceed {POSITION_MARGIN} positions"
        )
    if options.context < 2 * tree.emitted:
        raise ConfigError(
            f"--context {options.context} cannot hold a prompt and 2 steps of {tree.emitted} "
            "tokens each"
        )
    heads = int(config.num_attention_heads)
    streams = any(app.settings for app in apps)
    geometry = Geometry(
        layers=int(config.num_hidden_layers) + max(app.draft_layers for app in apps),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        gamma=tree.depth,
        k=tree.width,
        tree=tree,
        context=options.context,
        chunk=chunk,
        hidden=int(config.hidden_size) if options.choose else 0,
        short=0 if streams or tree.depth < 2 * target.short else target.short,
    )
    if options.phrases and (streams or not geometry.gamma):
        raise ConfigError(
            "--phrases are drafts without streams: they need a --tree, such as chain:4, and no "
            "streams"
        )
    return geometry


def _longer(context: int, config: Any) -> tuple[str, ...]:
    """A note for a context beyond the positions that the model was made for; if they are a table,
    it is refused.
    """
    known = getattr(config, "max_position_embeddings", None)
    if known is None or context <= known:
        return ()
    return (f"{LONGER}: {context} tokens, {known} positions",)


def _check_form(options: ExportOptions, target: "Exporter", merged: bool) -> None:
    if options.quant not in target.bits:
        raise ConfigError(
            f"target {options.form} has no {options.quant} form; it offers {', '.join(target.bits)}"
        )
    if options.calibrate and options.quant not in target.calibrates:
        able = ", ".join(sorted(target.calibrates)) or "no precision"
        raise ConfigError(
            f"--calibrate: target {options.form} takes it for {able}, not for {options.quant}"
        )
    if options.choose and not target.chooses:
        raise ConfigError(f"--choose host: target {options.form} chooses tokens in the graph only")
    if merged and options.adapter_precision is not Quant.FP32:
        raise ConfigError(
            "--adapter-precision is for separate adapters; a single one is merged, unless with "
            "--slots"
        )
    if not merged and not target.several_apps:
        asked = f"{len(options.adapters)} adapters" if len(options.adapters) > 1 else "--slots"
        raise ConfigError(
            f"{asked}: one merged adapter per {options.form} bundle; export a bundle for each app"
        )


def _app(name: str, adapter: Path, identity: BaseIdentity, config: Any, merged: bool) -> AppPlan:
    """An app with an adapter that fits the base and, unless ``merged``, other apps; raises
    InputError.
    """
    check_rule("an app's name", name, NAME)
    if not adapter.is_dir():
        raise InputError(f"--adapter {name}={adapter}: no such folder")
    opened = AdapterFolder.open(adapter, identity)
    if opened.settings is not None:
        opened.settings.streams.check_layers(config.num_hidden_layers)
    if not merged:
        opened.check_apart()
    return AppPlan(adapter, opened.settings, opened.has_lora, name)


def _schedule(options: ExportOptions, target: "Exporter", apps: tuple[AppPlan, ...]) -> Schedule:
    """The requested schedule, the papers' for streams of their recipes, or the target's.

    Streams that see the chosen token wait for it.
    """
    trained = [(app.name, app.settings) for app in apps if app.settings is not None]
    waiting = [name for name, settings in trained if settings.streams.waits]
    if options.schedule is not None and not trained:
        raise ConfigError(
            "--schedule needs an adapter with streams: without one there is nothing to schedule"
        )
    if waiting and options.schedule is Schedule.FUSED:
        raise ConfigError(
            f"--schedule fused: the streams of {waiting[0]!r} see the token that verification "
            "chooses (token_rank), so they run after it: omit --schedule"
        )
    if waiting:
        return Schedule.DEFERRED
    if options.schedule is not None:
        return options.schedule
    papers = trained and all(s.training.get("recipe", "ours") != "ours" for _, s in trained)
    return Schedule.FUSED if papers else target.schedule


def _tree(options: ExportOptions, apps: tuple[AppPlan, ...], merged: bool, repeats: int) -> Tree:
    """The requested tree, or the chain of the streams that all apps have; without streams, of
    ``repeats`` drafts if the only app is ``merged`` into the graphs.
    """
    gammas = {app.name: app.settings.streams.gamma for app in apps if app.settings is not None}
    if not gammas:
        tree = options.tree or Tree.chain(repeats if merged else 0)
        if tree.size > 1 and not (tree.is_chain and merged):
            raise ConfigError(
                "--tree without an adapter with streams: drafts then repeat the text, which takes "
                "a chain such as chain:4 and a bundle of one app without --slots"
            )
        return tree
    if options.tree is None:
        return Tree.chain(min(gammas.values()))
    if options.tree.size == 1:
        raise ConfigError("--tree has only its root; omit --adapter to export only plain decoding")
    for name, gamma in gammas.items():
        if options.tree.depth > gamma:
            raise ConfigError(
                f"--tree is {options.tree.depth} deep, the adapter of {name!r} has γ = {gamma} "
                "streams"
            )
    return options.tree
