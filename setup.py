"""What pyproject.toml cannot say: a wheel holds our kernels, compiled.

That takes a C++ compiler where the wheel is built. Such a wheel fits any Python of its platform.
``SSDEVICE_PURE_WHEEL=1`` builds one without kernels, for every platform.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PURE = bool(os.environ.get("SSDEVICE_PURE_WHEEL"))


class BuildWithKernels(build_py):
    """Compiles the kernels into the package."""

    def run(self) -> None:
        super().run()
        if PURE or self.editable_mode:
            return
        # The package is imported as it will be installed.
        sys.path.insert(0, str(Path(self.build_lib).resolve()))
        from ssdevice.errors import InputError
        from ssdevice.runtime.onnx import kernels

        try:
            print("kernels:", kernels.compiled(kernels.SOURCES))
        except InputError as error:
            print(f"no kernels: {error}", file=sys.stderr)
        sys.path.pop(0)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python of one platform, or of all platforms if it has no kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        has_kernels = any(Path(self.bdist_dir).rglob("kernels-*"))
        platform = super().get_tag()[2] if has_kernels else "any"
        return ("py3", "none", platform)


class WithKernels(Distribution):
    """Kernels count as an extension module: files go where those of a platform go."""

    def has_ext_modules(self) -> bool:
        return not PURE


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithKernels)
