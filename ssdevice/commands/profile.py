"""``ssdevice bench --profile``: where the time of a call goes, inside the target and around it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ssdevice.bench.runner import available_arms
from ssdevice.data import Example
from ssdevice.runtime.session import Session

SHOWN = 12


def show_profile(session: Session, examples: Sequence[Example], max_tokens: int) -> None:
    """Decode a few prompts in every arm and print time by operator and the host's share.

    The engine's own bookkeeping slows calls down, so only shares count.
    """
    console = Console(soft_wrap=True, highlight=False)
    arms = Table("arm", "steps", "inside, ms/step", "host, µs/step", title="Steps")
    for name in available_arms(session):
        steps, native, host = 0, 0.0, 0.0
        for example in examples:
            for _ in session.runs(
                session.prompt_ids(example.prompt, system=example.system), max_tokens=max_tokens, arm=name
            ):
                pass
            answer = session.last
            steps += answer.steps
            native += answer.native_seconds
            host += answer.decode_seconds - answer.native_seconds
        count = max(steps, 1)
        arms.add_row(name, str(steps), f"{native / count * 1e3:.3f}", f"{host / count * 1e6:.0f}")
    console.print(arms)
    for function, kinds in session.engine.profile().items():
        total = sum(kinds.values()) or 1.0
        table = Table("operator", "share", "ms", title=f"{function}: kernels")
        ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
        for kind, microseconds in ordered[:SHOWN]:
            table.add_row(kind, f"{microseconds / total:.1%}", f"{microseconds / 1e3:.1f}")
        if rest := sum(microseconds for _, microseconds in ordered[SHOWN:]):
            table.add_row(f"{len(ordered) - SHOWN} others", f"{rest / total:.1%}", f"{rest / 1e3:.1f}")
        console.print(table)
