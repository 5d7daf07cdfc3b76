"""``python -m tests.runtime.onnx.forks LIBRARY COUNT``: forks so often while a thread runs a
session on the kernels' crew.

Every child runs another session, opens a third one, and ends within a time; the session that the
thread runs is not for children, since ONNX Runtime may hold a lock of it. Prints how many hung, and
how many computed something else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import onnxruntime as ort

from ssdevice.runtime.onnx import kernels
from tests.fuzz.operator_graphs import Node

HANG_SECONDS = 30
THREADS = 6


def opened(library: Path) -> ort.InferenceSession:
    """A session of one linear, whose products the crew shares."""
    draw = np.random.default_rng(0)
    codes = draw.integers(-127, 127, (64, 1024)).astype(np.int8)
    scales = np.ones(1024, np.float32)
    x = np.zeros((1, 1, 64), np.float32)
    node = Node(
        kernels.INT8_LINEAR,
        (x, codes, scales, np.array(128, np.uint8)),
        constants=frozenset({1, 2, 3}),
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    with kernels.crew(library, THREADS):
        options.register_custom_ops_library(str(library))
        return ort.InferenceSession(node.model(), options)


def main() -> None:
    library = Path(sys.argv[1])
    session = opened(library)
    other = opened(library)
    feeds = {"i0": np.ones((1, 1, 64), np.float32)}
    expected = session.run(None, feeds)[0]
    running = True

    def run() -> None:
        while running:
            session.run(None, feeds)

    caller = threading.Thread(target=run)
    caller.start()
    hung = 0
    wrong = 0
    for _ in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            signal.alarm(HANG_SECONDS)
            found = [each.run(None, feeds)[0] for each in (other, other, opened(library))]
            os._exit(not all(np.array_equal(each, expected) for each in found))
        _, status = os.waitpid(child, 0)
        hung += os.WIFSIGNALED(status)
        wrong += os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0
    running = False
    caller.join()
    print(f"{hung} hung, {wrong} wrong")


if __name__ == "__main__":
    main()
