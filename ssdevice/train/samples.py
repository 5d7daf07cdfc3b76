"""The samples of a training run: rows of the data, or what the model writes itself."""

from __future__ import annotations

from typing import Any

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.config import Mode
from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.lora import merge_lora
from ssdevice.train.batches import Sample, tokenize
from ssdevice.train.distill import own_completions
from ssdevice.train.job import Job
from ssdevice.train.options import ANSWER_TOKENS
from ssdevice.train.self_prompt import self_prompts, write_rows


def read_samples(job: Job, hf: Any, init: AdapterFolder | None, examples: list[Example]) -> list[Sample]:
    """The samples: completions of the data or the model's own ones, to prompts of the data or the model's own ones.

    The model that answers is ``hf``, in shared mode with the LoRA of ``init`` if it has one.
    """
    options, place, tokenizer = job.options, job.place, job.tokenizer
    own = options.self_prompt
    teacher = None
    if options.self_distill or own is not None:
        lora = init.folder if init is not None and init.has_lora and options.streams.mode is Mode.SHARED else None
        answering = merge_lora(loading.load_hf(job.folder), lora) if lora is not None else hf
        teacher = loading.build(answering, None, options.max_length).backbone.to(place.device)
    if own is not None:
        assert teacher is not None
        prompts = self_prompts(job, teacher, own)
        longest = options.max_length // 2
        prompts = [p for p in prompts if len(tokenizer.prompt_ids(p, instruction=options.instruction)) <= longest]
        examples = [Example(prompt, " ") for prompt in prompts]
    samples, dropped = tokenize(examples, tokenizer, options.instruction, options.max_length)
    if dropped:
        job.report("data", len(samples), len(examples), f"{dropped} longer than {options.max_length} tokens left out")
    if len(samples) < place.world:
        raise InputError(f"{len(samples)} examples are too few for {place.world} processes")
    if teacher is None:
        return samples
    in_data = ANSWER_TOKENS if own is not None else max(len(s.ids) - s.prompt for s in samples)
    longest = options.answer_tokens or in_data
    most = [max(1, min(longest, options.max_length - sample.prompt)) for sample in samples]
    samples = own_completions(job, teacher, samples, most, "distill")
    if own is not None and place.main:
        write_rows(job, prompts, samples)
    return samples
