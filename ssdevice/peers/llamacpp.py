"""llama.cpp through llama-cpp-python, on a GGUF file: plain, and with its prompt lookup."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ssdevice.peers.arm import Answer, Json, Offers, Setup, Skip, lookup_arms

NAME = "llama.cpp"


def offers(setup: Setup) -> Offers:
    """Plain decoding, and prompt lookup of each size."""
    if not setup.gguf.is_file():
        yield Skip(NAME, f"{setup.gguf}: no such file; --gguf names the same weights as GGUF")
        return
    yield from lookup_arms(NAME, __name__, setup, setup.gguf.stat().st_size, gguf=str(setup.gguf))


def open_engine(settings: Json) -> LlamaCpp:
    """The model of a GGUF file."""
    return LlamaCpp(**settings)


class LlamaCpp:
    """``lookup``: tokens that are proposed at once; 0 decodes plainly."""

    def __init__(
        self,
        gguf: str,
        threads: int,
        context: int,
        stops: Sequence[int],
        sampling: Json,
        lookup: int,
    ) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._llama: Any = llama_cpp.Llama(
            gguf,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            # It keeps logits of all rows when it has a draft, but without this option has room for
            # one batch only.
            logits_all=lookup > 0,
            verbose=False,
        )
        asked = dict(sampling)
        self._llama.set_seed(asked.pop("seed", 0))
        # Its own defaults would truncate: 0 and 1 leave all tokens.
        self._options: Json = {
            "temp": asked.pop("temperature", 0.0),
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
        }
        self._options |= asked
        self._calls = 0
        evaluate = self._llama.eval

        def counted(tokens: Sequence[int]) -> None:
            self._calls += 1
            evaluate(tokens)

        # Where mypy sees the package's types, it lets no method be assigned.
        vars(self._llama)["eval"] = counted
        text = ctypes.create_string_buffer(128)
        llama_cpp.llama_model_desc(self._llama.model, text, len(text))
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self.weights = text.value.decode().split(maxsplit=2)[-1]  # such as "llama 135M Q4_0"

    def answer(self, prompt: Sequence[int], answer: Answer) -> None:
        """See ``Engine``."""
        self._llama.reset()  # else it continues from what this prompt has in common with the last
        seen = -1
        for token in self._llama.generate(list(prompt), **self._options):
            if answer.add((token,), same_call=self._calls == seen):
                return
            seen = self._calls
