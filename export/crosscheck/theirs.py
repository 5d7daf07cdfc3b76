"""What transformers, and PEFT without merging, compute of a few prompts: logits and the first tokens of an answer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ssdevice.export.crosscheck.generation import generation_config, unapplied
from ssdevice.export.crosscheck.logits import Expected
from ssdevice.memory import free_memory
from ssdevice.model.loading import load_hf, stored_parameters
from ssdevice.model.lora import check_peft

TOKENS = 32
"""Of the answer to the first prompt, and at most so many of each other prompt whose logits are compared."""
MAPPED = 1 << 30
"""A model of more bytes in float32 is read with its weights mapped: a second one need not fit into memory."""


@torch.no_grad()
def expected_of(
    folder: Path, adapters: Sequence[Path | None], prompts: Sequence[Sequence[int]], context: int, scratch: Path | None
) -> list[list[Expected]]:
    """Of every adapter (None: the base without one), what transformers computes of every prompt.

    An answer is generated to the first one. ``context``: no text is longer. ``scratch``: for mapped weights, see
    ``load_hf``.
    """
    prompts = [list(prompt[: max(1, context - TOKENS)]) for prompt in prompts]
    hf, found = _load(folder, scratch), []
    for adapter in adapters:
        with _with_adapter(hf, adapter) as model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that do not go together
            answer = _generate(model, prompts[0], min(TOKENS, context - len(prompts[0])))
            texts = [_expected(model, [*prompts[0], *answer[:-1]], len(prompts[0]) - 1, answer)]
            texts += [_expected(model, prompt, max(len(prompt) // 2, len(prompt) - TOKENS)) for prompt in prompts[1:]]
        found.append(texts)
    del hf, model
    free_memory()
    return found


def _load(folder: Path, scratch: Path | None) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    if scratch is not None and 4 * sum(stored_parameters(folder).values()) > MAPPED:
        hf = load_hf(folder, scratch=scratch)
        hf.set_attn_implementation("eager")
    else:
        # Not "sdpa", which leaves out what it cannot do, such as Gemma 2's soft cap.
        wanted: Any = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
        hf = AutoModelForCausalLM.from_pretrained(folder, **wanted).eval()
    own = generation_config(folder)
    # Where settings are known to change the answer, the rest is compared without them.
    hf.generation_config = GenerationConfig(eos_token_id=own.eos_token_id) if unapplied(own) else own
    return hf


@contextmanager
def _with_adapter(hf: Any, adapter: Path | None) -> Iterator[Any]:
    """The model with an adapter beside its weights, as long as the context lasts."""
    if adapter is None:
        yield hf
        return
    from peft import PeftModel

    check_peft(adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base may lie elsewhere than when the adapter was saved
        wrapped = PeftModel.from_pretrained(hf, str(adapter)).eval()
    yield wrapped
    wrapped.unload()


def _generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    form = {"cache_implementation": None, "return_dict_in_generate": False}
    out: list[int] = model.generate(input_ids=ids, **given, **form)[0].tolist()
    return out[len(prompt) :]


def _expected(model: Any, tokens: list[int], first: int, chosen: list[int] | None = None) -> Expected:
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, first:].float().clone()
    return Expected(tokens, first, logits, chosen)
