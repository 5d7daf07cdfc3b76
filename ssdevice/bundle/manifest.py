"""The manifest of a bundle as strict dataclasses.

``manifest.json`` is read before anything is verified, so every number, text and list in it has a
bound: field metadata in the terms of JSON Schema, which the checks here and the published schema
share.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from ssdevice import contract, targets
from ssdevice.bundle.integrity import PATH, SEGMENT, check_paths, parse_strict
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.config import Mode, Schedule, load_strict, to_json
from ssdevice.contract import CacheForm, FunctionSpec, Geometry, TensorSpec
from ssdevice.errors import BundleError, ConfigError, SSDeviceError
from ssdevice.rules import Rule, Ruled, repeated_name, within
from ssdevice.text.chat_template import ChatFormat

SCHEMA_VERSION = 1
MAX_FILES = 4096
MAX_FILE_BYTES = 1 << 37  # a sparse file of a terabyte would be hashed for minutes
MAX_APPS = 256
LONGER = "the context is longer than the model was made for, so answers may get worse"
NOT_APPLIED = "generation_config.json asks for settings that a bundle does not apply"
"""Notes that begin with one of these two are repeated wherever a bundle answers."""

SHA256: Rule = {
    "maxLength": 64,
    "pattern": "^[0-9a-f]{64}$",
    "description": "64 hexadecimal digits",
}
NAME: Rule = {
    "maxLength": 64,
    "pattern": f"^{SEGMENT}$",
    "description": "plain letters, digits and _.+=@- that begin with a letter, a digit or _ and do "
    "not end with a dot",
}
ROLE: Rule = {
    "maxLength": 100,
    "pattern": f"^[a-z][a-z0-9_]*(:{SEGMENT})?$",
    "description": "a word in lower case, such as tokenizer, or with a name, such as adapter:sql",
}
EVERY_FUNCTION = contract.GREEDY + contract.CHOOSING
COUNT: Rule = within(0, MAX_FILE_BYTES)
SHORT: Rule = {"maxLength": 200}
TEXT: Rule = {"maxLength": 1 << 16}


def entries(most: int, **rules: Rule) -> Rule:
    """The rule for a mapping of at most so many entries; ``rules``: those for their names and
    values.
    """
    return {"maxProperties": most, **rules}


ROLES = entries(MAX_FILES, propertyNames=ROLE, additionalProperties=PATH)


class Precision(StrEnum):
    """How weights are stored.

    Except on Core ML, int8 and int4 also quantize the inputs of linears, one scale per row.
    ``palette4``: sixteen values per group of channels, fitted to the weight (Core ML only).
    """

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"
    PALETTE4 = "palette4"


class CacheDtype(StrEnum):
    """Element type of the KV cache."""

    FP32 = "float32"
    FP16 = "float16"
    BF16 = "bfloat16"


class AdapterKind(StrEnum):
    """Where an app's weights are: in the graph (``merged``), in files loaded into its inputs or
    buffers (``slot``), in separate functions (``function``), or nowhere (``base``).
    """

    MERGED = "merged"
    SLOT = "slot"
    FUNCTION = "function"
    BASE = "base"


@dataclass(frozen=True)
class ModelIdentity(Ruled):
    """The base model: ``sha256`` of its weight files, ``parameters`` in elements."""

    model_type: str = field(metadata=NAME)
    parameters: int = field(metadata=within(1, 1 << 50))
    layers: int = field(metadata=within(1, 1024))
    hidden_size: int = field(metadata=within(1, 1 << 20))
    vocab: int = field(metadata=within(1, 1 << 24))
    sha256: str = field(metadata=SHA256)


@dataclass(frozen=True)
class App(Ruled):
    """An app of the bundle.

    ``mode``, ``msa_layers``: of its streams, None and 0 without. ``instruction``: text before every
    user message. ``rank``: of its LoRA, 0 without. ``folder``: its folder in the bundle. ``files``:
    what an engine loads for it. ``functions``: contract name -> the app's name, where the target
    has functions per app.
    """

    name: str = field(metadata=NAME)
    kind: AdapterKind
    base_sha256: str = field(metadata=SHA256)
    mode: Mode | None = None
    msa_layers: int = field(default=0, metadata=within(0, 1023))
    instruction: str = field(default="", metadata=TEXT)
    rank: int = field(default=0, metadata=within(0, 1 << 14))
    folder: str | None = field(default=None, metadata=PATH)
    files: tuple[str, ...] = field(default=(), metadata={"maxItems": MAX_FILES, "items": PATH})
    functions: dict[str, str] = field(
        default_factory=dict, metadata=entries(16, additionalProperties=NAME)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is AdapterKind.SLOT and not self.files:
            raise ConfigError(f"app {self.name!r} is a slot but lists no files to load into it")
        for name in self.functions:
            if name not in EVERY_FUNCTION:
                raise ConfigError(
                    f"app {self.name!r}: {name[:60]!r} is not a function "
                    f"({', '.join(EVERY_FUNCTION)})"
                )

    @property
    def answers_as_base(self) -> bool:
        """Whether its main rows are the base's own, so that any decoder of the base must give the
        same answers.
        """
        return self.kind is AdapterKind.BASE or (self.mode is Mode.LOSSLESS and not self.rank)


@dataclass(frozen=True)
class FileEntry(Ruled):
    """Size in bytes and sha256 of one file."""

    size: int = field(metadata=COUNT)
    sha256: str = field(metadata=SHA256)


@dataclass(frozen=True)
class Manifest(Ruled):
    """The contents of ``manifest.json``. Raises ConfigError for values that contradict each other.

    ``tools``: package -> version. ``mode``, ``msa_layers``: of the first app with streams; apps
    that are not merged may differ. ``functions``: those of the contract that the bundle has.
    ``calibrated_rows``: rows, of data or the model's own, used to round weights; 0: to nearest.
    ``sampling``: what the model's ``generation_config.json`` asks of hosts that choose tokens.
    ``notes``: how the bundle differs from the request, one sentence each. ``parity``: the largest
    differences from the reference, measured by the export. ``roles``: role -> its file or folder.
    ``files``: path -> size and hash of all files but the manifest and its signature.
    ``BundleWriter.commit`` fills ``files`` and ``roles``.
    """

    tools: dict[str, str] = field(
        metadata=entries(100, propertyNames=SHORT, additionalProperties=SHORT)
    )
    model: ModelIdentity
    target: str = field(metadata={"enum": list(targets.BUILT_IN)})  # and registered targets
    precision: Precision
    mode: Mode | None
    schedule: Schedule
    cache: CacheForm
    cache_dtype: CacheDtype
    geometry: Geometry
    msa_layers: int = field(metadata=within(0, 1023))
    functions: tuple[FunctionSpec, ...] = field(
        metadata={"minItems": 1, "maxItems": len(EVERY_FUNCTION)}
    )
    chat: ChatFormat
    apps: tuple[App, ...] = field(metadata={"minItems": 1, "maxItems": MAX_APPS})
    default_app: str = field(metadata=NAME)
    calibrated_rows: int = field(default=0, metadata=COUNT)
    sampling: ModelSampling | None = None
    notes: tuple[str, ...] = field(default=(), metadata={"maxItems": 1000, "items": TEXT})
    parity: dict[str, float] = field(
        default_factory=dict, metadata=entries(1000, propertyNames=SHORT)
    )
    roles: dict[str, str] = field(default_factory=dict, metadata=ROLES)
    files: dict[str, FileEntry] = field(
        default_factory=dict, metadata=entries(MAX_FILES, propertyNames=PATH)
    )
    schema_version: int = field(
        default=SCHEMA_VERSION, metadata=within(SCHEMA_VERSION, SCHEMA_VERSION)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            targets.find(self.target)
        except ConfigError as error:
            raise ConfigError(f"target: {error}") from None
        self._check_sizes()
        self._check_functions()
        self._check_apps()

    def _check_sizes(self) -> None:
        g = self.geometry
        if g.vocab != self.model.vocab:
            raise ConfigError(f"model.vocab is {self.model.vocab}, geometry.vocab {g.vocab}")
        if g.layers < self.model.layers or (g.layers > self.model.layers and self.mode is None):
            raise ConfigError(f"model.layers is {self.model.layers}, geometry.layers {g.layers}")
        if g.hidden not in (0, self.model.hidden_size):
            raise ConfigError(
                f"model.hidden_size is {self.model.hidden_size}, geometry.hidden {g.hidden}"
            )
        if (self.mode is not None and not g.gamma) or (self.msa_layers and self.mode is None):
            raise ConfigError(
                f"geometry.gamma is {g.gamma}, msa_layers {self.msa_layers}, mode {self.mode}: a "
                "bundle with streams has a mode and a gamma, one without has null and no msa_layers"
            )
        if self.msa_layers >= self.model.layers:
            raise ConfigError(
                f"msa_layers is {self.msa_layers}, the model has {self.model.layers} layers"
            )

    def _check_functions(self) -> None:
        expected = contract.functions(self.geometry, self.cache, self.cache_dtype)
        names = [spec.name for spec in self.functions]
        if names != [name for name in expected if name in names]:
            raise ConfigError(
                f"functions are {str(names)[:200]}, expected some of {', '.join(expected)} in this "
                "order"
            )
        deciding = {contract.STEP, contract.PLAIN} & set(names)
        if (
            contract.PREFILL not in names
            or not deciding
            or (contract.STEP in names and not self.geometry.gamma)
        ):
            raise ConfigError(
                f"functions are {names}: expected prefill, and step (with streams) or step_plain"
            )
        _check_pair("functions", names, self.mode)
        for spec in self.functions:
            if spec != expected[spec.name]:
                raise _first_difference(spec, expected[spec.name])

    def _check_apps(self) -> None:
        names = [app.name for app in self.apps]
        twice = repeated_name(name.lower() for name in names)
        if twice is not None:
            raise ConfigError(f"app {twice!r} appears twice")
        if self.default_app not in names:
            raise ConfigError(
                f"default_app {self.default_app!r} is not one of the apps {', '.join(names)[:200]}"
            )
        for app in self.apps:
            if app.base_sha256 != self.model.sha256:
                raise ConfigError(
                    f"app {app.name!r} is for another base: its base_sha256 is "
                    f"{app.base_sha256[:12]}.., the model's is {self.model.sha256[:12]}.."
                )
            if app.kind is AdapterKind.MERGED and app.mode not in (None, self.mode):
                raise ConfigError(
                    f"app {app.name!r} has mode {app.mode}, the bundle has {self.mode}"
                )
            _check_pair(f"app {app.name!r}", app.functions, app.mode)

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def check_files(self) -> None:
        """Raise ConfigError unless ``files`` have safe, distinct names, and apps and roles refer
        only to them.
        """
        if not self.files:
            raise ConfigError("files: the bundle lists none")
        folders = check_paths(self.files)
        if self.total_bytes > MAX_FILE_BYTES:
            raise ConfigError(f"files: more than {MAX_FILE_BYTES} bytes together")
        for role, path in self.roles.items():
            if path not in self.files and path not in folders:
                raise ConfigError(f"roles[{role!r}]: {path!r} is not in files")
        for app in self.apps:
            for path in app.files:
                if path not in self.files:
                    raise ConfigError(f"app {app.name!r}: {path!r} is not in files")
            if app.folder is not None and app.folder not in folders:
                raise ConfigError(f"app {app.name!r}: no file in its folder {app.folder!r}")


def _check_pair(where: str, names: Collection[str], mode: Mode | None) -> None:
    """Raise ConfigError for a draft of streams that is verified, but not drafted again and moved to
    the front.
    """
    if mode is not None and (contract.VERIFY in names) != (contract.DRAFT in names):
        raise ConfigError(
            f"{where}: {', '.join(names)[:200]}: {contract.VERIFY} and {contract.DRAFT} need each "
            "other"
        )


def _first_difference(found: FunctionSpec, expected: FunctionSpec) -> ConfigError:
    for kind in ("inputs", "outputs", "states"):
        mine = [_shown(tensor) for tensor in getattr(found, kind)]
        theirs = [_shown(tensor) for tensor in getattr(expected, kind)]
        for i, (one, other) in enumerate(zip_longest(mine, theirs, fillvalue="nothing")):
            if one != other:
                return ConfigError(
                    f"functions: {found.name}.{kind}[{i}] is {one}, its geometry asks for {other}"
                )
    return ConfigError(f"functions: {found.name} differs from its geometry")


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.name[:60]!r} {tensor.dtype[:20]!r} {str(list(tensor.shape))[:80]}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file: UTF-8, schema_version first.

    Raises SSDeviceError for NaN and non-JSON values.
    """
    values = {"schema_version": manifest.schema_version, **to_json(manifest)}
    try:
        text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()
    except (TypeError, ValueError) as error:
        raise SSDeviceError(f"the manifest has a value that JSON cannot hold: {error}") from error


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in these bytes, after every check that needs no other file.

    ``where`` names it in messages. Raises BundleError with one line that names the field.
    """
    raw = parse_strict(data, where)
    version = raw.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise BundleError(
            f"{where}: made by a newer ssdevice: schema {str(version)[:20]}, this one reads "
            f"{SCHEMA_VERSION}; update ssdevice"
        )
    if version is None:
        raise BundleError(f"{where}: 'schema_version' is missing: not the manifest of a bundle")
    try:
        manifest = load_strict(Manifest, raw, where)
    except ConfigError as error:
        raise BundleError(str(error)) from None
    try:
        manifest.check_files()
    except ConfigError as error:
        raise BundleError(f"{where}: {error}") from None
    return manifest
