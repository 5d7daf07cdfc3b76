"""What a target is on the export side: everything that commands and stages ask of it.

``ssdevice.export.TARGET.target`` offers ``TARGET``, an ``ExportTarget``. Importing it loads no framework, so that the
command line can list its options; its methods import what they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from ssdevice import targets
from ssdevice.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from ssdevice.bundle.folder import Bundle
    from ssdevice.bundle.manifest import Precision
    from ssdevice.export.cost import Cost
    from ssdevice.export.plan import Exporter, ExportOptions
    from ssdevice.model.step import StreamModel
    from ssdevice.runtime.engine import Engine, EngineOptions

AsStored = tuple[AbstractContextManager[None] | None, "Precision"]
"""A context in which a torch model rounds as a bundle does, None where that is not known; the precision of what then
still differs."""


class TargetOptions(ABC):
    """Choices that only some targets offer: the base of frozen dataclasses whose fields all have defaults.

    ``owner``: whose they are, in the genitive; ``flags``: how the command line spells them.
    """

    owner: ClassVar[str]
    flags: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Declare the flags."""

    @classmethod
    @abstractmethod
    def parse(cls, args: Namespace) -> Self:
        """What the flags say; raises ConfigError."""

    def refused(self, target: str) -> ConfigError:
        """The error of a target that does not know these options."""
        *most, last = self.flags
        named = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        return ConfigError(f"{named} {self.owner}, not {target}'s")


class ExportTarget(ABC):
    """One target. ``extra``: of pip, with what an export needs; ``options``: those of its own that it reads;
    ``cost``: what its exports take, None where nobody measured it."""

    name: ClassVar[str]
    extra: ClassVar[str]
    options: ClassVar[tuple[type[TargetOptions], ...]] = ()
    cost: ClassVar[Cost | None] = None

    @abstractmethod
    def exporter(self, options: ExportOptions) -> Exporter:
        """What writes and checks the files; a missing package is a ModuleNotFoundError."""

    def check(self, options: ExportOptions) -> None:
        """Raise ConfigError for options that cannot go together on this target."""
        for chosen in options.target_options:
            if type(chosen) not in self.options:
                raise chosen.refused(self.name)

    def form(self, chosen: Iterable[TargetOptions]) -> str:
        """The target as folders and messages name it; more than its name where an option makes it another."""
        return self.name

    def describe(self, options: ExportOptions) -> dict[str, Any]:
        """What ``--dry-run`` adds for this target."""
        return {}

    def logits_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> Engine | None:
        """An engine whose conversations keep ``logits [emitted, vocab]`` of their last step; None: it cannot be had."""
        return None

    def as_stored(self, bundle: Bundle, app: str | None, model: StreamModel) -> AsStored:
        """How the torch model is made to round as the bundle does."""
        return None, bundle.manifest.precision

    def parts(self, engine: Engine) -> Mapping[str, str]:
        """By kernel of the step: what part of the method it works for, where that can be told."""
        return {}


def export_target(name: str) -> ExportTarget:
    """The export side of a target; raises ConfigError for a name that is none's."""
    return cast(ExportTarget, targets.load(targets.find(name).export))


def exporter(options: ExportOptions) -> Exporter:
    """The exporter for these options; raises MissingExtraError naming the extra that installs what it needs."""
    target = export_target(options.target)
    try:
        return target.exporter(options)
    except ModuleNotFoundError as error:
        raise MissingExtraError(target.extra, error.name or target.name) from error


def all_options() -> tuple[type[TargetOptions], ...]:
    """The options of every target, each once."""
    return tuple(dict.fromkeys(kind for name in targets.names() for kind in export_target(name).options))
