"""The interface of a target on the export side, for commands and stages.

``ssdevice.export.TARGET.target`` defines ``TARGET``, an ``ExportTarget``. Importing it loads no
framework, so that the command line can list its options; its methods import what they need.
"""

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from ssdevice import targets
from ssdevice.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.bundle.manifest import Precision
    from ssdevice.export.exporter import Exporter
    from ssdevice.export.plan import ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions

AsStored = tuple[AbstractContextManager[object] | None, "Precision"]
"""A context that makes a torch model round as a bundle does, or None, and the precision of what
still differs.
"""


@dataclass(frozen=True)
class TargetOptions:
    """Base of a target's own options: frozen dataclasses with fields that are flags or values of an
    Enum.

    ``owner``: in the genitive, such as "Core ML's". ``texts``: the help of each field's flag.
    """

    owner: ClassVar[str]
    texts: ClassVar[Mapping[str, str]]

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Declare the flags; they are None or False unless they are given."""
        group = parser.add_argument_group(f"{cls.owner} own options")
        for name, text in cls.texts.items():
            flag = _flag(name)
            default = getattr(cls, name)
            kind: Any = type(default)
            if default is False:
                group.add_argument(flag, action="store_true", help=text)
            elif "_missing_" in vars(kind):  # it understands other texts than its values
                group.add_argument(flag, metavar="NAME", help=f"{text} (default {default})")
            else:
                group.add_argument(flag, choices=list(kind), help=f"{text} (default {default})")

    @classmethod
    def parse(cls, args: Namespace) -> Self | None:
        """The options in parsed arguments; None if none was given. Raises ConfigError."""
        values = {name: getattr(args, name) for name in cls.texts}
        given = {name: value for name, value in values.items() if value not in (None, False)}
        if not given:
            return None
        return cls(**{name: type(getattr(cls, name))(value) for name, value in given.items()})

    def refused(self, target: str) -> ConfigError:
        """The error of a target that does not have these options."""
        *most, last = map(_flag, self.texts)
        named = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        return ConfigError(f"{named} {self.owner}, not {target}'s")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class ExportTarget(ABC):
    """One target.

    ``extra``: the pip extra that an export needs; ``options``: the TargetOptions that it takes.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    options: ClassVar[tuple[type[TargetOptions], ...]] = ()

    @abstractmethod
    def exporter(self, options: "ExportOptions") -> "Exporter":
        """The Exporter for these options. A missing package raises ModuleNotFoundError."""

    def check(self, options: "ExportOptions") -> None:
        """Raise ConfigError for options that this target cannot combine."""
        for chosen in options.target_options:
            if type(chosen) not in self.options:
                raise chosen.refused(self.name)

    def form(self, chosen: Iterable[TargetOptions]) -> str:
        """The target's name in folders and messages, with options that change what it is."""
        return self.name

    def describe(self, options: "ExportOptions") -> dict[str, Any]:
        """What ``--dry-run`` adds for this target."""
        return {}

    def logits_engine(
        self, bundle: "Bundle", app: str | None, options: "EngineOptions"
    ) -> "Engine | None":
        """An engine that shows logits (``Conversation.logits``); None if there is none."""
        return None

    def as_stored(self, bundle: "Bundle", app: str | None, model: "StreamModel") -> AsStored:
        """How to make the torch model round as the bundle does."""
        return None, bundle.manifest.precision

    def parts(self, engine: "Engine") -> Mapping[str, str]:
        """Kernel of the step -> the part of the method it belongs to, as far as the target can
        tell.
        """
        return {}


def export_target(name: str) -> ExportTarget:
    """The export side of a target.

    Raises ConfigError for an unknown name or a target that cannot be loaded.
    """
    module = targets.find(name).export
    try:
        return cast(ExportTarget, targets.load(module))
    except ModuleNotFoundError as error:
        raise ConfigError(f"target {name!r}: there is no module {module}") from error


def exporter(options: "ExportOptions") -> "Exporter":
    """The exporter for these options.

    Raises MissingExtraError, which names the extra to install.
    """
    target = export_target(options.target)
    with needs_extra(target.extra):
        return target.exporter(options)


def all_options() -> tuple[type[TargetOptions], ...]:
    """The TargetOptions of all targets, each once."""
    return tuple(
        dict.fromkeys(kind for name in targets.names() for kind in export_target(name).options)
    )
