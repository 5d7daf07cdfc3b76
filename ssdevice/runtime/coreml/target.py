"""The Core ML target on the runtime side."""

from pathlib import Path
from typing import Any

from ssdevice.bundle.folder import Bundle
from ssdevice.errors import InputError
from ssdevice.runtime.engine import Engine, EngineOptions
from ssdevice.runtime.target import AppFile, RuntimeTarget

PACKAGE = "package"


class CoreMLTarget(RuntimeTarget):
    """One package whose functions are the apps."""

    name = "coreml"
    extra = "coreml"

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine:
        from ssdevice.runtime.coreml.engine import open_engine

        return open_engine(bundle, app, options)

    def app_file(self, bundle: Bundle, name: str, folder: Path) -> AppFile:
        from ssdevice.bundle.manifest import AdapterKind

        # The bundle does not contain the apps' adapters, so the user must name their folders again.
        manifest = bundle.manifest
        given = [app.name for app in manifest.apps if app.kind is not AdapterKind.BASE]
        adapters = [f"--adapter {app}=DIR" for app in given]
        adapters.append(f"--adapter {name}={folder}")
        raise InputError(
            f"{bundle.folder} is a {self.name} bundle, whose apps are functions of one package, "
            f"made together; export it again with app {name!r} among them: ssdevice export "
            f"--model BASE --target {self.name} --quant {manifest.precision} "
            f"{' '.join(adapters)} --out {bundle.folder} --overwrite"
        )

    def describe(self, bundle: Bundle) -> dict[str, Any]:
        from ssdevice.mil.audit import audit
        from ssdevice.mil.reader import Package
        from ssdevice.runtime.coreml.engine import MODEL

        return {PACKAGE: audit(Package.open(bundle.file(MODEL)))}


TARGET = CoreMLTarget()
