"""What the server counts, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ssdevice.runtime.generation import Generation, Reason

TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that the KV cache held already.",
    "completion_tokens": "Tokens of answers.",
    "steps": "Calls of the model after an answer's first token.",
    "stepped_tokens": "Tokens that these calls emitted.",
    "prefill_seconds": "Seconds until first tokens.",
    "decode_seconds": "Seconds of decoding after first tokens.",
    "answers": "Answers, whole or cancelled.",
    "cancelled": "Answers whose clients went.",
}


class Metrics:
    """Sums over all answers, and HTTP responses by status."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    def count(self, answer: Generation) -> None:
        """Count an answer that has ended."""
        self.sums.update({
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": len(answer.tokens),
            "steps": answer.steps,
            "stepped_tokens": sum(answer.accepted),
            "answers": 1,
            "cancelled": answer.reason is Reason.CANCELLED,
        })  # fmt: skip
        self.sums["prefill_seconds"] += answer.prefill_seconds  # type: ignore[assignment]
        self.sums["decode_seconds"] += answer.decode_seconds  # type: ignore[assignment]

    @property
    def mean_seconds(self) -> float:
        """Of an answer."""
        return (self.sums["prefill_seconds"] + self.sums["decode_seconds"]) / max(1, self.sums["answers"])

    def text(self, pending: int) -> str:
        """The page ``/metrics``; ``pending``: requests that wait or are decoded."""
        lines = []
        for name, about in COUNTERS.items():
            lines += _family(f"{name}_total", "counter", about, {"": self.sums[name]})
        lines += _family("tokens_per_step", "gauge", "Tokens that a call emitted on average.", {"": self.per_step})
        lines += _family("pending_requests", "gauge", "Requests that wait or are decoded.", {"": pending})
        by_status = {f'{{status="{status}"}}': count for status, count in sorted(self.statuses.items())}
        return "\n".join([*lines, *_family("responses_total", "counter", "HTTP responses.", by_status), ""])

    @property
    def per_step(self) -> float:
        """β over all answers; 0 before the first step."""
        return self.sums["stepped_tokens"] / max(1, self.sums["steps"])


def _family(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    name = f"ssdevice_{name}"
    rows = [f"{name}{label} {value:.10g}" for label, value in values.items()]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *rows]
