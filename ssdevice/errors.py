"""What can go wrong, as a small hierarchy: the class decides the exit code, the message says what to do."""

from __future__ import annotations


class SSDeviceError(Exception):
    """A failure of the tool itself or of a check it made (exit code 1)."""

    exit_code = 1


class InputError(SSDeviceError):
    """Something the caller gave is wrong: a path, an option, a prompt (exit code 2)."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration value, a tree or a file of settings that cannot be used."""


class UnsupportedModelError(InputError):
    """A model whose family or features the step graph cannot express."""


class BundleError(InputError):
    """A bundle that is missing, damaged, unsafe or of another schema."""


class MissingExtraError(InputError):
    """An optional dependency that the command needs is not installed."""

    def __init__(self, extra: str, module: str) -> None:
        super().__init__(f"{module} is not installed; install it with: pip install 'ssdevice[{extra}]'")
        self.extra = extra


class ContextOverflowError(InputError):
    """A prompt that does not fit the context the bundle was exported with."""


class ParityError(SSDeviceError):
    """An exported artifact does not compute what its reference computes."""


def first_line(error: Exception) -> str:
    """What a message has room for of another library's error."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: libraries have words of their own for it."""
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return told or isinstance(error, MemoryError)
