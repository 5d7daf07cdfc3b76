"""What a training run is given."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ssdevice.config import Mode, StreamConfig, to_json
from ssdevice.errors import ConfigError


class Objective(StrEnum):
    """The Speculative Streaming loss, or next-token LoRA fine-tuning: the baseline it is compared with."""

    STREAMING = "streaming"
    NEXT_TOKEN = "next-token"


ANSWER_TOKENS = 192


@dataclass(frozen=True)
class SelfPrompt:
    """How the model writes its own prompts: so many, sampled at this temperature from this share of probability."""

    prompts: int
    temperature: float = 0.8
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if self.prompts < 1:
            raise ConfigError(f"--self-prompt {self.prompts}: ask for 1 or more")
        if not (self.temperature > 0 and 0 < self.top_p <= 1):
            raise ConfigError("--temperature is above 0, --top-p above 0 and at most 1")


@dataclass(frozen=True)
class TrainOptions:
    """One run. ``steps`` 0: ``epochs`` over the data. ``lr`` falls linearly to 0 after ``warmup`` steps.

    ``alpha_main``/``alpha_stream``: α0 and αj of eq. 5; None: 1 and 0.1 in shared mode, 0 and 1 in lossless mode.
    ``self_distill``: train on the model's own greedy completions. ``limit``: use the first rows only (0: all).
    ``init``: adapter folder to go on from; with ``self_distill`` it is also whose completions are learned.
    ``self_prompt``: no data; the model writes the prompts as well. ``answer_tokens``: most tokens of an own answer
    (None: as the longest of the data, or ANSWER_TOKENS). ``batch_size``: per process.
    ``draft_vocabulary``: tokens that streams choose among (0: all, None: see vocabulary.default_size).
    ``precision``: of products: bf16, fp32, or auto: bf16 where the hardware has it. ``base_precision``: how the frozen
    base is held in memory. ``recompute``: gradient checkpointing. ``keep_gb``: memory for main rows that lossless
    training keeps between epochs.
    """

    model: str
    data: tuple[Path, ...]
    app: str
    out: Path
    streams: StreamConfig = field(default_factory=StreamConfig)
    objective: Objective = Objective.STREAMING
    instruction: str = ""
    dev: Path | None = None
    dev_limit: int = 100
    limit: int = 0
    init: Path | None = None
    epochs: float = 5.0
    steps: int = 0
    batch_size: int = 32
    accumulate: int = 1
    lr: float = 5e-4
    warmup: int = 50
    weight_decay: float = 0.0
    alpha_main: float | None = None
    alpha_stream: float | None = None
    max_length: int = 512
    segment: int = 64
    precision: str = "auto"
    base_precision: str = "fp32"
    recompute: bool = False
    draft_vocabulary: int | None = None
    self_prompt: SelfPrompt | None = None
    answer_tokens: int | None = None
    seed: int = 0
    self_distill: bool = False
    checkpoint_seconds: float = 120.0
    keep_gb: float = 4.0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.accumulate < 1 or self.segment < 1 or self.max_length < 2:
            raise ConfigError("batch size, accumulation and segment are 1 or more, max length is 2 or more")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise ConfigError(f"--answer-tokens {self.answer_tokens}: answers have 1 or more")
        if self.precision not in ("auto", "bf16", "fp32") or self.base_precision not in ("bf16", "fp32"):
            raise ConfigError(f"precision {self.precision!r}, of the base {self.base_precision!r}: see --help")
        if bool(self.data) == (self.self_prompt is not None):
            raise ConfigError("give either --data FILE or --self-prompt N, with which the model writes its own prompts")
        if self.lr <= 0 or (self.steps <= 0 and self.epochs <= 0):
            raise ConfigError("lr and the number of epochs or steps are above 0")
        if self.objective is Objective.NEXT_TOKEN and self.streams.mode is Mode.LOSSLESS:
            raise ConfigError("next-token training changes main rows: it has no lossless mode")

    @property
    def alphas(self) -> tuple[float, float]:
        """(α0, αj)."""
        if self.objective is Objective.NEXT_TOKEN:
            return 1.0, 0.0
        lossless = self.streams.mode is Mode.LOSSLESS
        main = (0.0 if lossless else 1.0) if self.alpha_main is None else self.alpha_main
        stream = (1.0 if lossless else 0.1) if self.alpha_stream is None else self.alpha_stream
        return main, stream

    def fingerprint(self, base_sha256: str, world: int) -> str:
        """Identifies the run: equal options, data and base continue a checkpoint, others must not.

        ``world``: processes; two with half the batch each continue what one began.
        """
        fixed = {
            k: v for k, v in vars(self).items() if k not in ("out", "checkpoint_seconds", "dev", "dev_limit", "keep_gb")
        }
        fixed["batch_size"] = self.batch_size * world
        fixed["data"] = [str(path) for path in self.data]
        fixed["init"] = str(self.init) if self.init is not None else None
        text = json.dumps([to_json(fixed), base_sha256], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
