"""The page's worker and transformers.js in one headless Chromium, in turns; see docs/web.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssdevice.bench.statistics import speedup, spread
from ssdevice.bundle.folder import Bundle
from ssdevice.commands import web
from ssdevice.commands.web import Site
from ssdevice.data import read_examples
from ssdevice.runtime.loop import SPECULATIVE
from tests.apps.web_demo import host
from tests.apps.web_demo.test_page import chromium, serving

TRANSFORMERS = (
    "@huggingface/transformers/dist/transformers.min.js",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.wasm",
)
"""What transformers.js loads, below its ``node_modules``."""
PLAIN = "plain"
COLUMNS = (
    "",
    "tokens/s",
    "quartiles",
    "TTFT ms",
    "tokens/step",
    "speculative over it",
    "tokens of plain",
)

Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.apps.web_demo.compare", description=__doc__
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="its default app is measured")
    add(
        "peers",
        type=Path,
        metavar="DIR",
        help="folder with a folder for each model, as transformers.js wants them",
    )
    add("models", nargs="+", metavar="FOLDER:DTYPE", help="such as smollm2:q8")
    add("--data", type=Path, required=True, metavar="FILE", help="JSONL with prompts")
    add(
        "--transformers",
        type=Path,
        required=True,
        metavar="DIR",
        help="node_modules with @huggingface/transformers",
    )
    add("--limit", type=int, default=8, metavar="N", help="prompts (default 8)")
    add("--rounds", type=int, default=2, metavar="N", help="(default 2)")
    add("--max-tokens", type=int, default=80, metavar="N", help="(default 80)")
    args = parser.parse_args()
    bundle = Bundle.open(args.bundle)
    arms = [{"name": mode, "worker": "/worker.js", "mode": mode} for mode in (PLAIN, SPECULATIVE)]
    for model in args.models:
        folder, _, dtype = model.partition(":")
        arms.append(
            {"name": model, "worker": f"/peer.js?model={folder}&dtype={dtype}", "mode": PLAIN}
        )
    work = {
        "arms": arms,
        "prompts": [
            each.prompt for each in read_examples(args.data, args.limit, require_completion=False)
        ],
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "app": bundle.manifest.default_app,
    }
    with serving(site(bundle, args.transformers, args.peers)) as address:
        done = host.script("compare.mjs", chromium(), address, given=json.dumps(work))
    if done.returncode:
        raise SystemExit(done.stderr)
    print(table([json.loads(line) for line in done.stdout.splitlines()]))


def site(bundle: Bundle, packages: Path, peers: Path) -> Site:
    """The page, transformers.js and its models under one address."""
    library = {f"transformers/{Path(name).name}": packages / name for name in TRANSFORMERS}
    models = {
        f"peers/{file.relative_to(peers).as_posix()}": file
        for file in peers.rglob("*")
        if file.is_file()
    }
    return {**web.site(bundle), "peer.js": host.HERE / "peer.js", **library, **models}


def table(answers: Sequence[Json]) -> str:
    """A line for each arm.

    Speeds are compared by the time of a token, because answers may differ.
    """
    arms: dict[str, list[Json]] = {}
    for answer in answers:
        arms.setdefault(answer["arm"], []).append(answer)
    times: dict[str, list[float]] = {}
    for arm, own in arms.items():
        times[arm] = [each["seconds"] / (len(each["tokens"]) - 1) for each in own]
    lines = [" | ".join(COLUMNS), "|".join("---" for _ in COLUMNS)]
    for arm, own in arms.items():
        speed = spread([1 / time for time in times[arm]])
        first = spread([each["first"] * 1000 for each in own])
        cells = [
            arm,
            f"{speed.median:.1f}",
            f"{speed.q1:.1f}..{speed.q3:.1f}",
            f"{first.median:.0f}",
        ]
        tokens = sum(len(each["tokens"]) - 1 for each in own)
        steps = sum(each["steps"] for each in own)
        cells.append(f"{tokens / steps:.2f}")
        ratio = speedup(times[arm], times[SPECULATIVE])
        cells.append(
            f"{ratio.estimate:.2f}x ({ratio.low:.2f}..{ratio.high:.2f})"
            if arm != SPECULATIVE
            else ""
        )
        same = sum(
            mine["tokens"] == plain["tokens"] for mine, plain in zip(own, arms[PLAIN], strict=True)
        )
        lines.append(" | ".join([*cells, f"{same} of {len(own)}"]))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    main()
