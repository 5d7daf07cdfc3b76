"""A process that holds one engine and answers over a pipe: a line of JSON in, a line of JSON out.

The first line names the module of a peer and the settings for its ``open_engine``; each further one
is a prompt.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import IO

from ssdevice.errors import typed_line
from ssdevice.memory import own_peak_mb
from ssdevice.peers.arm import Answer, Engine, Json


def main() -> None:
    """Serve until standard input ends."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to standard output too
    request = json.loads(sys.stdin.readline())
    settings = request["settings"]
    # Whatever goes wrong in another engine is told to the process that measures, which knows
    # whether it matters.
    try:
        engine: Engine = import_module(request["module"]).open_engine(settings)
    except ModuleNotFoundError as error:
        _tell(pipe, {"missing": error.name or str(error)})
        return
    except Exception as error:
        _tell(pipe, {"error": typed_line(error)})
        return
    _tell(pipe, {"version": engine.version, "weights": engine.weights})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = Answer(request["max_tokens"], settings["stops"])
            engine.answer(request["prompt"], answer)
        except Exception as error:
            _tell(pipe, {"error": typed_line(error)})
            return
        _tell(pipe, answer.as_json() | {"peak_mb": own_peak_mb()})


def _tell(pipe: IO[str], reply: Json) -> None:
    print(json.dumps(reply), file=pipe, flush=True)
