"""The errors of ssdevice: the class decides the exit code, the message says what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SSDeviceError(Exception):
    """A failure of the tool itself, or of one of its checks (exit code 1)."""

    exit_code = 1


class InputError(SSDeviceError):
    """Invalid input from the caller: a path, an option, a prompt (exit code 2)."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value, a tree or a file of settings that cannot be used."""


class TemplateRefusal(ConfigError):
    """A conversation that the chat template does not take."""


class UnsupportedModelError(InputError):
    """A model whose family or features the step graph cannot express."""


class BundleError(InputError):
    """A bundle that is missing, damaged, unsafe or has another schema."""


class MissingExtraError(InputError):
    """An optional dependency that the command needs is not installed."""

    def __init__(self, extra: str, module: str) -> None:
        package = f"ssdevice[{extra}]" if extra else "ssdevice"
        super().__init__(f"{module} is not installed; install it with: pip install '{package}'")


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """In this context a package that is not installed is a MissingExtraError.

    ``name``: the extra that has the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(name, error.name or name) from error


@contextmanager
def reading(file: Path, error: type[SSDeviceError] = InputError) -> Iterator[None]:
    """In this context a file that cannot be read is an ``error`` that names it."""
    try:
        yield
    except FileNotFoundError as problem:
        raise error(f"{file}: no such file") from problem
    except OSError as problem:
        raise error(f"{file}: cannot be read ({problem.strerror or problem})") from problem


class ContextOverflowError(InputError):
    """A prompt that does not fit the context of the bundle."""


class ParityError(SSDeviceError):
    """An exported artifact does not compute what its reference computes."""


REFUSALS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    re.error,
)
"""What transformers and PEFT raise for mistakes in settings, most of which they do not check."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message; the error's type if the message is empty.

    A line that ends with a colon announces the next one, which then belongs to it.
    """
    if isinstance(error, LookupError):  # it says little but the key
        return f"{type(error).__name__}: {error}"
    said = ""
    for line in str(error).splitlines():
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return said.removesuffix(":") or type(error).__name__


def typed_line(error: BaseException) -> str:
    """The type of an error and its ``first_line``."""
    return f"{type(error).__name__}: {first_line(error)}"


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a Git LFS pointer begins: a small text in the place of a large file that is not fetched."""


def check_no_pointer(file: Path) -> None:
    """Raise InputError for a Git LFS pointer in the place of a file; any other file is fine."""
    if not file.is_file():  # opening a pipe would block
        return
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise InputError(
                f"{file} is a Git LFS pointer, not the file itself: fetch it with 'git lfs pull'"
            )


NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: each library words it differently."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
