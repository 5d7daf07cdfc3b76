"""A saved ``.mlpackage``: its manifest, program and weights, all checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ssdevice import strict_json
from ssdevice.contract import FunctionSpec, TensorSpec
from ssdevice.errors import BundleError
from ssdevice.mil.blob import BlobFile, Entry
from ssdevice.mil.dtypes import Array
from ssdevice.mil.schema import BlobRef, Function, Model, Operation, TensorType, Value, parse_model
from ssdevice.wire import WireError

MANIFEST = "Manifest.json"
DATA = "Data"
MODEL_PATH = "@model_path/"  # in a program: the folder that holds the model file
MAX_MANIFEST_BYTES = 1 << 20
MAX_PROGRAM_BYTES = 1 << 30


class Package:
    """An opened package; create one with ``Package.open``.

    ``functions`` maps names to functions. ``default_function`` is the one Core ML runs if the caller names none.
    Weights are memory-mapped; ``constant`` reads one.
    """

    def __init__(self, path: Path, model: Model, folder: Path) -> None:
        self.path = path
        self.functions = dict(model.functions)
        self.default_function = model.default_function
        self.specification_version = model.version
        self._folder = folder
        self._blobs: dict[str, BlobFile] = {}

    @classmethod
    def open(cls, path: Path | str) -> Package:
        """Read and check the package at ``path``.

        Raises BundleError if a file is missing, a path leaves the package, the program is malformed, or a weight
        is not at its offset with the type and size that the program declares.
        """
        path = Path(path)
        model_file = _root_model(path)
        try:
            if model_file.stat().st_size > MAX_PROGRAM_BYTES:
                raise BundleError(f"{model_file}: larger than {MAX_PROGRAM_BYTES} bytes")
            data = model_file.read_bytes()
        except OSError as error:
            raise BundleError(f"{model_file}: cannot be read: {error.strerror or error}") from None
        try:
            model = parse_model(data)
        except WireError as error:
            raise BundleError(f"{model_file}: not a usable model file: {error}") from None
        package = cls(path, model, model_file.parent)
        for function in model.functions.values():
            for operation in function.operations:
                for value in constants(operation):
                    if isinstance(value.data, BlobRef):
                        package._entry(value)
        return package

    def spec(self, function: str) -> FunctionSpec:
        """Inputs, outputs and states of a function with shapes and dtypes; "?" is a size that is not fixed.

        Raises BundleError if the package has no such function.
        """
        found = self.function(function)
        types = dict(found.inputs)
        for operation in found.operations:
            types.update(operation.outputs)
        inputs = tuple(_tensor(name, kind) for name, kind in found.inputs if not kind.state)
        states = tuple(_tensor(name, kind) for name, kind in found.inputs if kind.state)
        outputs = tuple(_tensor(name, types[name]) for name in found.outputs)
        return FunctionSpec(function, inputs, outputs, states)

    def function(self, name: str) -> Function:
        """The function called ``name``. Raises BundleError if there is none."""
        if name not in self.functions:
            raise BundleError(f"{self.path} has no function {name!r}; it has {', '.join(sorted(self.functions))}")
        return self.functions[name]

    def constant(self, value: Value) -> Array:
        """The array of a tensor constant in its stored type, from the program or from the weight file."""
        if isinstance(value.data, BlobRef):
            blob, entry = self._entry(value)
            return blob.read(entry).reshape([size or 0 for size in self._type(value).shape])
        if isinstance(value.data, str | tuple):
            raise BundleError(f"{self.path}: a string or a list is given where a tensor is needed")
        return value.data

    def stored_bytes(self, value: Value) -> int:
        """Bytes a constant takes on disk."""
        if isinstance(value.data, BlobRef):
            return self._entry(value)[1].size
        return 0 if isinstance(value.data, str | tuple) else value.data.nbytes

    def _entry(self, value: Value) -> tuple[BlobFile, Entry]:
        assert isinstance(value.data, BlobRef)
        kind = self._type(value)
        if kind.dtype is None or None in kind.shape:
            raise BundleError(f"{self.path}: a stored weight has no fixed tensor type")
        name = value.data.file
        if name not in self._blobs:
            if not name.startswith(MODEL_PATH):
                raise BundleError(f"{self.path}: weight file {name!r} does not begin with {MODEL_PATH}")
            self._blobs[name] = BlobFile(_inside(self._folder, name[len(MODEL_PATH) :], self.path))
        blob = self._blobs[name]
        return blob, blob.entry(value.data.offset, kind.dtype, kind.count)

    def _type(self, value: Value) -> TensorType:
        if value.type is None:
            raise BundleError(f"{self.path}: a stored weight has no type")
        return value.type


def constants(operation: Operation) -> Iterator[Value]:
    """Every constant in an operation: its attributes and its inline parameters."""
    yield from operation.attributes.values()
    for arguments in operation.inputs.values():
        yield from (argument for argument in arguments if isinstance(argument, Value))


def _tensor(name: str, kind: TensorType) -> TensorSpec:
    dtype = "string" if kind.dtype is None else kind.dtype.name
    return TensorSpec(name, tuple("?" if size is None else size for size in kind.shape), dtype)


def _root_model(path: Path) -> Path:
    """The model file that a package's manifest names. Checks every path in the manifest."""
    manifest = path / MANIFEST
    if not path.is_dir():
        raise BundleError(f"{path} is not a folder; a Core ML package is a folder with {MANIFEST}")
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{manifest}: larger than {MAX_MANIFEST_BYTES} bytes")
        data = manifest.read_bytes()
    except OSError as error:
        raise BundleError(f"{manifest}: cannot be read: {error.strerror or error}") from None
    content = strict_json.parse(data, str(manifest), BundleError)
    items = content.get("itemInfoEntries") if isinstance(content, dict) else None
    root = content.get("rootModelIdentifier") if isinstance(content, dict) else None
    if not isinstance(items, dict) or not isinstance(root, str) or root not in items:
        raise BundleError(f"{manifest}: names no root model (rootModelIdentifier among itemInfoEntries)")
    files = {}
    for key, item in items.items():
        name = item.get("path") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise BundleError(f"{manifest}: item {key!r} has no path")
        files[key] = _inside(path / DATA, name, path)
        if not files[key].exists():
            raise BundleError(f"{path}: {DATA}/{name} is named in {MANIFEST} but missing")
    return files[root]


def _inside(folder: Path, name: str, package: Path) -> Path:
    """``folder/name``. Raises BundleError if it would leave the package, directly or through a link."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(f"{package}: the path {name!r} leaves the package")
    target = folder.joinpath(*parts)
    if not target.resolve().is_relative_to(package.resolve()):
        raise BundleError(f"{package}: the path {name!r} leaves the package through a link")
    return target
