"""coremltools' protobuf classes of model files, without the rest of it, which imports torch and takes seconds."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_NAME = "ssdevice_coreml_proto"


@cache
def model_class() -> Any:
    """The class ``Model`` of Model.proto. Raises ModuleNotFoundError without coremltools."""
    found = find_spec("coremltools")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("coremltools is not installed", name="coremltools")
    file = Path(found.origin).parent / "proto" / "__init__.py"
    spec = spec_from_file_location(_NAME, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[_NAME] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return import_module(f"{_NAME}.Model_pb2").Model
