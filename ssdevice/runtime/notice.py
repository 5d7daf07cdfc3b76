"""What a process prints on stderr: messages only once, and none of native libraries that raise an
error as well.
"""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache

_muted = threading.RLock()


@cache
def say_once(text: str) -> None:
    """Print a line on stderr unless this process has already printed it."""
    print(text, file=sys.stderr)


@contextmanager
def native_silence() -> Iterator[None]:
    """In this context nothing reaches stderr, where some C++ libraries log unasked.

    They write to Python's stream, as bindings redirect them, or to the process's. For short calls
    only: it holds for all threads.
    """
    with _muted, redirect_stderr(io.StringIO()):  # two at a time would restore each other's silence
        try:
            kept = os.dup(2)
        except OSError:  # stderr is closed
            yield
            return
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
