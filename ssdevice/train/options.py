"""The options of a training run."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ssdevice.adapters.settings import PEFT_CONFIG, PEFT_WEIGHTS, SETTINGS, WEIGHTS
from ssdevice.config import Mode, StreamConfig, StreamMLP, to_json
from ssdevice.data import Example
from ssdevice.errors import ConfigError
from ssdevice.rules import ABOVE_0, POSITIVE, Ruled, within


class Objective(StrEnum):
    """The Speculative Streaming loss, or next-token LoRA fine-tuning, its baseline."""

    STREAMING = "streaming"
    NEXT_TOKEN = "next-token"


class Recipe(StrEnum):
    """What is trained and how: our streams, or exactly those of a paper with its loss.

    ``paper``: the lossless mode of *Speculative Streaming: Efficient and Scalable Speculative
    Decoding with Multi-Stream Attention* (figure 2a, appendix H.2). ``paper-v1``: the mode of
    2402.11131. See docs/paper.md.
    """

    OURS = "ours"
    PAPER = "paper"
    PAPER_V1 = "paper-v1"


_OURS_ONLY: dict[str, Any] = {
    "token_rank": 0,
    "follow_rank": 0,
    "draft_vocabulary": 0,
    "soft_labels": 0.0,
    "by_reach": False,
    "freeze_lora": False,
}
FIXED: dict[Recipe, dict[str, Any]] = {
    Recipe.OURS: {},
    Recipe.PAPER: {"mode": Mode.LOSSLESS, "stream_mlp": StreamMLP.ADAPTER_ONLY, **_OURS_ONLY},
    Recipe.PAPER_V1: {"mode": Mode.SHARED, **_OURS_ONLY},
}
"""The options in which a recipe leaves no choice.

Its loss is a sum as well, and its export runs ``fused``.
"""
ANSWER_TOKENS = 192
"""Tokens of an answer at most, where no data says how long answers are."""
EPOCHS = 5
UNFINISHED = ".training"
"""Folder in ``out`` that holds an unfinished run."""


@dataclass(frozen=True)
class LossWeights:
    """``main``: α0 for the main stream. ``stream``: αj for every speculative stream.

    - ``by_reach``: a guess also counts by how likely the streams before it are right, which decides
      whether it is ever asked; not in the paper.
    - ``soft``: the share of a stream's loss that is the cross entropy with the model's own
      probabilities over the draft vocabulary, not with the next token.
    - ``summed``: losses are sums over all predicted tokens, as in eq. 5, not means over those of a
      stream.
    """

    main: float
    stream: float
    by_reach: bool = False
    soft: float = 0.0
    summed: bool = False


@dataclass(frozen=True)
class TrainOptions(Ruled):
    """The options of one run, as ``ssdevice train --help`` explains them.

    - ``recipe``: the other options must be as FIXED says.
    - ``steps``: None for EPOCHS over the data.
    - ``alpha_stream``: αj of eq. 5; None for 0.1, or for 1 if main rows stay as they are.
    - ``by_reach``: see LossWeights; None for yes if main rows stay as they are.
    - ``init``: adapter folder to continue from; with ``self_distill`` its completions are learned.
    - ``self_prompt``: without data, the model writes so many prompts.
    - ``answer_tokens``: None for the longest completion of the data, or ANSWER_TOKENS.
    - ``batch_size``: per process.
    - ``draft_vocabulary``: 0 for all tokens, None for trainer.DRAFT_VOCABULARY.
    - ``precision``: of matrix products. ``base_precision``: of the frozen base in memory.

    Raises ConfigError for values out of bounds, or that contradict each other.
    """

    model: str
    data: tuple[Path, ...]
    app: str
    out: Path
    streams: StreamConfig = field(default_factory=StreamConfig)
    recipe: Recipe = Recipe.OURS
    objective: Objective = Objective.STREAMING
    instruction: str = ""
    dev: Path | None = None
    limit: int | None = field(default=None, metadata=POSITIVE)
    init: Path | None = None
    freeze_lora: bool = False
    steps: int | None = field(default=None, metadata=POSITIVE)
    batch_size: int = field(default=32, metadata=POSITIVE)
    lr: float = field(default=5e-4, metadata=ABOVE_0)
    alpha_stream: float | None = field(default=None, metadata=within(0, 1e6))
    by_reach: bool | None = None
    soft_labels: float = field(default=0.0, metadata=within(0, 1))
    max_length: int = field(default=512, metadata={"minimum": 2})
    segment: int = field(default=64, metadata=POSITIVE)
    precision: str = "auto"
    base_precision: str = "fp32"
    draft_vocabulary: int | None = None
    self_prompt: int | None = field(default=None, metadata=POSITIVE)
    answer_tokens: int | None = field(default=None, metadata=POSITIVE)
    seed: int = field(default=0, metadata=within(0, (1 << 63) - 1))
    self_distill: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.precision in ("auto", "bf16", "fp32")
        known_of_base = self.base_precision in ("bf16", "fp32")
        if not known or not known_of_base:
            raise ConfigError(
                f"precision {self.precision!r}, of the base {self.base_precision!r}: see --help"
            )
        self._check_recipe()
        has_data = bool(self.data)
        writes_prompts = self.self_prompt is not None
        if has_data == writes_prompts:
            raise ConfigError(
                "give either --data FILE, or --self-prompt N to let the model write its own prompts"
            )
        if self.objective is Objective.NEXT_TOKEN:
            self._check_next_token()
        shares_lora = self.streams.mode is Mode.SHARED and self.objective is Objective.STREAMING
        if self.freeze_lora and (self.init is None or not shares_lora):
            raise ConfigError(
                "--freeze-lora is for streams in shared mode, "
                "with the --init whose LoRA stays as it is"
            )
        if self.frozen and not self.weights.stream:
            raise ConfigError("nothing is learned: raise --alpha-stream above 0")

    def _check_recipe(self) -> None:
        """Raise ConfigError for an option that the recipe has otherwise."""
        given = vars(self.streams) | vars(self)
        for name, value in FIXED[self.recipe].items():
            if given[name] != value:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {given[name]}: --recipe {self.recipe} has {value}"
                )
        if self.recipe is not Recipe.OURS and not self.streams.msa_layers:
            raise ConfigError(f"--msa-layers 0: --recipe {self.recipe} has streams")

    def _check_next_token(self) -> None:
        """Raise ConfigError for an option that next-token training does not take."""
        if self.streams.mode is Mode.LOSSLESS:
            raise ConfigError("next-token training changes main rows: it has no lossless mode")
        if self.instruction or self.dev is not None:
            raise ConfigError(
                "next-token training has no streams to measure or describe: "
                "omit --dev and --instruction"
            )

    @property
    def nodes(self) -> int:
        """How many nodes run their streams in one pass: ``segment`` of every row of a batch."""
        return self.segment * self.batch_size

    @property
    def frozen(self) -> bool:
        """Whether main rows stay as they are."""
        return self.streams.mode is Mode.LOSSLESS or self.freeze_lora

    @property
    def weights(self) -> LossWeights:
        """What counts how much in the loss."""
        if self.objective is Objective.NEXT_TOKEN:
            return LossWeights(1.0, 0.0)
        stream = 1.0 if self.frozen else 0.1
        return LossWeights(
            main=0.0 if self.frozen else 1.0,
            stream=stream if self.alpha_stream is None else self.alpha_stream,
            by_reach=self.frozen if self.by_reach is None else self.by_reach,
            soft=self.soft_labels,
            summed=self.recipe is not Recipe.OURS,
        )

    def fingerprint(self, base_sha256: str, world: int, examples: Sequence[Example]) -> str:
        """A hash of options, base, and the contents of data (``examples``) and ``init``.

        Where they are stored does not matter. Only a run with the same hash continues a checkpoint.
        ``world``: number of processes; two with half the batch each may continue what one began.
        """
        fixed = {k: v for k, v in vars(self).items() if k not in ("out", "dev")}
        fixed["batch_size"] = self.batch_size * world
        fixed["data"] = hashlib.sha256(repr(examples).encode()).hexdigest()
        fixed["init"] = _adapter_sha256(self.init) if self.init is not None else None
        text = json.dumps([to_json(fixed), base_sha256], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def _adapter_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (SETTINGS, WEIGHTS, PEFT_CONFIG, PEFT_WEIGHTS):
        file = folder / name
        if file.is_file():
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        else:
            digest.update(b"absent")
    return digest.hexdigest()
