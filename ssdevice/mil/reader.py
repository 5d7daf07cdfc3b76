"""A saved ``.mlpackage``: manifest, program and weights, checked before anything is computed."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Self

from ssdevice.bundle.integrity import MAX_MANIFEST_BYTES, parse_strict, read_bounded
from ssdevice.contract import FunctionSpec, TensorSpec
from ssdevice.errors import BundleError
from ssdevice.mil.schema import BlobRef, Function, ModelFileError, TensorType, Value, parse_model
from ssdevice.mil.weights import Array, BlobFile, decode

MANIFEST = "Manifest.json"
DATA = "Data"
MODEL_PATH = "@model_path/"
"""In a program: the folder that holds the model file."""
MAX_PROGRAM_BYTES = 1 << 30


class Package:
    """An opened package; create one with ``Package.open``.

    ``functions`` maps names to functions. Weights are memory-mapped; ``constant`` reads one.
    """

    def __init__(
        self, path: Path, version: int, functions: Mapping[str, Function], folder: Path
    ) -> None:
        self.path = path
        self.specification_version = version
        self._folder = folder
        self.functions = dict(functions)
        self._blobs: dict[str, BlobFile] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Read and check the package at ``path``.

        Raises BundleError if a file is missing, a path leaves the package, the program is
        malformed, or a weight is not at its offset with the type and size that the program
        declares.
        """
        path = Path(path)
        model_file = _root_model(path)
        try:
            version, functions = parse_model(read_bounded(model_file, MAX_PROGRAM_BYTES))
        except ModelFileError as error:
            raise BundleError(f"{model_file}: not a usable model file: {error}") from None
        package = cls(path, version, functions, model_file.parent)
        for function in functions.values():
            package.places(function)
        return package

    def spec(self, function: str) -> FunctionSpec:
        """Inputs, outputs and states of a function with shapes and dtypes.

        Raises BundleError if the package has no such function.
        """
        found = self.function(function)
        inputs = tuple(_tensor(name, kind) for name, kind in found.inputs if not kind.state)
        states = tuple(_tensor(name, kind) for name, kind in found.inputs if kind.state)
        outputs = tuple(_tensor(name, found.types[name]) for name in found.outputs)
        return FunctionSpec(function, inputs, outputs, states)

    def function(self, name: str) -> Function:
        """The function called ``name``. Raises BundleError if there is none."""
        if name not in self.functions:
            raise BundleError(
                f"{self.path} has no function {name!r}; it has {', '.join(sorted(self.functions))}"
            )
        return self.functions[name]

    def constant(self, value: Value) -> Array:
        """The array of a tensor constant in its stored type.

        It is in the program, or in the weight file.
        """
        if isinstance(value.data, str):
            raise BundleError(f"{self.path}: a string is given where a tensor is needed")
        if not isinstance(value.data, BlobRef):
            return value.data
        assert value.type.dtype is not None
        elements = decode(self._stored(value), value.type.dtype, value.type.count)
        return elements.reshape(value.type.shape)

    def places(self, function: Function) -> dict[BlobRef, int]:
        """Bytes of the weights that a function reads, by their place in the weight files."""
        return {
            value.data: self._stored(value).nbytes
            for value in function.constants.values()
            if isinstance(value.data, BlobRef)
        }

    def _stored(self, value: Value) -> Array:
        """The bytes of a constant in the weight file."""
        assert isinstance(value.data, BlobRef)
        if value.type.dtype is None:
            raise BundleError(f"{self.path}: a stored weight is a string")
        name = value.data.file
        if name not in self._blobs:
            if not name.startswith(MODEL_PATH):
                raise BundleError(
                    f"{self.path}: weight file {name!r} does not begin with {MODEL_PATH}"
                )
            self._blobs[name] = BlobFile(_inside(self._folder, name[len(MODEL_PATH) :], self.path))
        return self._blobs[name].data(value.data.offset, value.type.dtype, value.type.count)


def _tensor(name: str, kind: TensorType) -> TensorSpec:
    return TensorSpec(name, kind.shape, "string" if kind.dtype is None else kind.dtype.name)


def _root_model(path: Path) -> Path:
    """The model file that a package's manifest names. Checks every path in the manifest."""
    manifest = path / MANIFEST
    if not path.is_dir():
        raise BundleError(f"{path} is not a folder; a Core ML package is a folder with {MANIFEST}")
    content = parse_strict(read_bounded(manifest, MAX_MANIFEST_BYTES), str(manifest))
    items = content.get("itemInfoEntries")
    root = content.get("rootModelIdentifier")
    if not isinstance(items, dict) or not isinstance(root, str) or root not in items:
        raise BundleError(
            f"{manifest}: names no root model (rootModelIdentifier among itemInfoEntries)"
        )
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
    """``folder/name``.

    Raises BundleError if it would leave the package, directly or through a link.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(f"{package}: the path {name!r} leaves the package")
    target = folder.joinpath(*parts)
    if not target.resolve().is_relative_to(package.resolve()):
        raise BundleError(f"{package}: the path {name!r} leaves the package through a link")
    return target
