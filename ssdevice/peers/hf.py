"""transformers in float32: plain ``generate``, and with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssdevice.peers.arm import Answer, Json, Offers, Setup, Skip, lookup_arms

NAME = "transformers"


def offers(setup: Setup) -> Offers:
    """Plain decoding, and prompt lookup of each size."""
    from ssdevice.adapters.base_files import weight_files
    from ssdevice.errors import InputError

    try:
        weights = weight_files(setup.model)
    except InputError as error:
        yield Skip(NAME, str(error))
        return
    files = [*weights, *setup.model.glob("*.json"), *setup.model.glob("*.jinja")]
    disk_bytes = sum(file.stat().st_size for file in files)
    yield from lookup_arms(NAME, __name__, setup, disk_bytes, model=str(setup.model.resolve()))


def open_engine(settings: Json) -> Transformers:
    """The model of a Hugging Face folder."""
    return Transformers(**settings)


class _Streamer:
    """Receives the prompt first, then the tokens of each call of the model."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._prompt = True

    def put(self, tokens: Any) -> None:
        """Called by ``generate``."""
        if not self._prompt:
            self._answer.add(tokens.flatten().tolist())
        self._prompt = False

    def end(self) -> None:
        """Called by ``generate``."""


class Transformers:
    """``lookup``: tokens that are proposed at once; 0 decodes plainly."""

    def __init__(
        self,
        model: str,
        threads: int,
        context: int,
        stops: Sequence[int],
        sampling: Json,
        lookup: int,
    ) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = loaded.eval()
        # A model's generation_config may ask for a penalty, which the other engines do not apply.
        asked = dict(sampling)
        torch.manual_seed(asked.pop("seed", 0))
        self._options: Json = {
            "do_sample": bool(asked),
            "repetition_penalty": 1.0,
            "eos_token_id": list(stops),
            "pad_token_id": stops[0],
        }
        if asked:
            self._options |= {"top_k": 0, "top_p": 1.0} | asked
        if lookup:
            self._options["prompt_lookup_num_tokens"] = lookup
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.weights = "fp32"

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """See ``Engine``."""
        ids = self._torch.tensor([list(prompt)])
        self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=answer.max_tokens,
            streamer=_Streamer(answer),
            **self._options,
        )
