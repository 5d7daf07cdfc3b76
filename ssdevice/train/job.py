"""What every stage of a training run is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssdevice.progress import Report
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train import checkpoint
from ssdevice.train.options import TrainOptions
from ssdevice.train.place import Place


@dataclass(frozen=True)
class Job:
    """One process's part of a run. ``folder``: the base's; ``report``: silent in all processes but the first."""

    options: TrainOptions
    place: Place
    folder: Path
    tokenizer: ChatTokenizer
    report: Report

    def store(self, stage: str) -> Path:
        """The file in which an unfinished run keeps what the model wrote in a stage."""
        return self.options.out / checkpoint.FOLDER / f"{stage.replace(' ', '_')}.jsonl"
