"""What a model's ``generation_config.json`` asks of the choice of tokens, as far as hosts can apply
it.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from ssdevice.rules import Rule, Ruled, within

MOST = 1 << 31
FACTOR: Rule = within(0, 100)
TOKEN: Rule = within(0, (1 << 24) - 1)
TOKENS: Rule = {"maxItems": 1 << 16, "items": TOKEN}
WORDS: Rule = {"maxItems": 1 << 16, "items": {"minItems": 1, "maxItems": 64, "items": TOKEN}}


@dataclass(frozen=True)
class ModelSampling(Ruled):
    """The settings of a model by the names of ``ssdevice.runtime.sampling.options.Sampling``; None:
    not named.

    ``do_sample``: whether ``generate`` of transformers samples with them. ``min_length``: of prompt
    and answer.
    """

    do_sample: bool = False
    temperature: float | None = field(default=None, metadata=FACTOR)
    top_k: int | None = field(default=None, metadata=within(0, MOST))
    top_p: float | None = field(default=None, metadata=FACTOR)
    min_p: float | None = field(default=None, metadata=FACTOR)
    typical_p: float | None = field(default=None, metadata=FACTOR)
    repetition_penalty: float | None = field(default=None, metadata=FACTOR)
    no_repeat_ngram_size: int | None = field(default=None, metadata=within(0, MOST))
    min_new_tokens: int | None = field(default=None, metadata=within(0, MOST))
    min_length: int | None = field(default=None, metadata=within(0, MOST))
    suppress: tuple[int, ...] = field(default=(), metadata=TOKENS)
    begin_suppress: tuple[int, ...] = field(default=(), metadata=TOKENS)
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=WORDS)

    def named(self) -> dict[str, Any]:
        """The settings that the model names, without ``do_sample``."""
        values = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "do_sample"
        }
        return {name: value for name, value in values.items() if value not in (None, ())}
