"""What the server counts, in Prometheus' text format."""

from collections import Counter
from collections.abc import Callable, Mapping

from ssdevice.runtime.generation import Generation, Reason

TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS: dict[str, tuple[str, Callable[[Generation], float]]] = {
    "prompt_tokens": ("Tokens of prompts.", lambda a: a.prompt_tokens),
    "cached_tokens": (
        "Tokens of prompts that the KV cache held already.",
        lambda a: a.cached_tokens,
    ),
    "completion_tokens": ("Tokens of answers.", lambda a: len(a.tokens)),
    "steps": ("Calls of the model after an answer's first token.", lambda a: a.steps),
    "stepped_tokens": ("Tokens that these calls emitted.", lambda a: sum(a.accepted)),
    "prefill_seconds": ("Seconds until first tokens.", lambda a: a.prefill_seconds),
    "decode_seconds": ("Seconds of decoding after first tokens.", lambda a: a.decode_seconds),
    "answers": ("Answers, whole or cancelled.", lambda _: 1),
    "cancelled": (
        "Answers whose clients went, or that failed.",
        lambda a: a.reason is Reason.CANCELLED,
    ),
}
"""What is added up over all answers."""


class Metrics:
    """Sums over all answers, and HTTP responses by status."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.statuses: Counter[int] = Counter()

    def count(self, answer: Generation) -> None:
        for name, (_, value) in COUNTERS.items():
            self.sums[name] += value(answer)

    @property
    def mean_seconds(self) -> float:
        seconds = self.sums["prefill_seconds"] + self.sums["decode_seconds"]
        return seconds / max(1, self.sums["answers"])

    def text(self, pending: int) -> str:
        """The page ``/metrics``; ``pending``: requests that wait or are decoded."""
        lines = []
        for name, (about, _) in COUNTERS.items():
            lines += _family(f"{name}_total", "counter", about, {"": self.sums[name]})
        per_step = {"": self.sums["stepped_tokens"] / max(1, self.sums["steps"])}
        about = "Tokens that a call emitted on average."
        lines += _family("tokens_per_step", "gauge", about, per_step)
        about = "Requests that wait or are decoded."
        lines += _family("pending_requests", "gauge", about, {"": pending})
        responses = {}
        for status, count in sorted(self.statuses.items()):
            responses[f'{{status="{status}"}}'] = count
        lines += _family("responses_total", "counter", "HTTP responses.", responses)
        return "\n".join([*lines, ""])


def _family(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    """The lines of a metric; ``values``: by label, which is empty for the only one."""
    name = f"ssdevice_{name}"
    rows = [f"{name}{label} {value:.10g}" for label, value in values.items()]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *rows]
