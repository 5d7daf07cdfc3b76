"""What ``generation_config.json`` asks of ``generate``, and which of it a bundle does not do."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.bundle.manifest import NOT_APPLIED
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.config import load_strict
from ssdevice.errors import REFUSALS, InputError, first_line
from ssdevice.text.chat_template import CONFIG_FILE, GENERATION_CONFIG_FILE

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ssdevice.text.tokenizer import ChatTokenizer

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
HARMLESS = frozenset(
    {
        *SAMPLING,
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "max_length",
        "max_new_tokens",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "low_memory",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "remove_invalid_values",
        "renormalize_logits",
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
        "decoder_start_token_id",
        "length_penalty",
        "early_stopping",
        "transformers_version",
        "_from_model_config",
    }
)
"""Settings that change no token of a greedy answer, or only beside another one, and those that a
bundle has (stops).
"""
NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
"""Values that switch a setting off, beside None, False and nothing in a list."""
APPLIED = {
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "repetition_penalty",
            "no_repeat_ngram_size",
            "min_new_tokens",
            "min_length",
        )
    },
    "suppress_tokens": "suppress",
    "begin_suppress_tokens": "begin_suppress",
    "bad_words_ids": "bad_words",
}
"""Settings that a host applies, and their names in the manifest."""


def generation_config(folder: Path) -> "GenerationConfig":
    """The settings that ``AutoModelForCausalLM`` loads from a folder; raises InputError."""
    from transformers import GenerationConfig

    file = folder / GENERATION_CONFIG_FILE
    form = dict[str, Any]()
    if not file.is_file():  # older models have the settings in the other file
        file = folder / CONFIG_FILE
        form = {"_from_model_config": True}
    try:
        return GenerationConfig.from_pretrained(folder, file.name, local_files_only=True, **form)
    except REFUSALS as error:
        raise InputError(f"{file}: transformers cannot read it ({first_line(error)})") from error


def check_settings(tokenizer: "ChatTokenizer", folder: Path, choose: bool) -> tuple[str, ...]:
    """Notes on what ``generate`` does otherwise; raises InputError for a token that ends only its
    answers.

    ``choose``: the host can choose tokens as the model asks.
    """
    config = generation_config(folder)
    for end in (
        config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ):
        if end is not None and end not in tokenizer.stop_ids:
            raise InputError(
                f"{folder}: token {end} ends answers of generate() of transformers, but not the "
                f"bundle's"
            )
    return generation_notes(config, choose)


def neutral(config: "GenerationConfig") -> "GenerationConfig":
    """Nothing but the tokens that end an answer."""
    from transformers import GenerationConfig

    return GenerationConfig(eos_token_id=config.eos_token_id)  # type: ignore[no-untyped-call]


def model_sampling(folder: Path, vocab: int) -> ModelSampling | None:
    """The settings of a model that a host applies, None without any; raises InputError for one out
    of its range.
    """
    from ssdevice.runtime.sampling.options import Sampling

    config = generation_config(folder)
    values = {}
    for setting, name in APPLIED.items():
        value = getattr(config, setting, None)
        if value is not None and value != [] and value != getattr(Sampling, name, None):
            values[name] = value
    try:
        asked = load_strict(
            ModelSampling, {**values, "do_sample": bool(config.do_sample)}, GENERATION_CONFIG_FILE
        )
        Sampling.sampled(asked).check_ids(vocab)
    except InputError as error:
        raise InputError(
            f"{folder}: {GENERATION_CONFIG_FILE}, which --choose host applies: {error}"
        ) from error
    return asked if asked.do_sample or asked.named() else None


def unapplied(config: "GenerationConfig", choose: bool = False) -> list[str]:
    """The settings that can change a greedy answer and that bundles do not apply, as
    ``name=value``.
    """
    # Names that transformers does not know mean nothing to it either.
    names = sorted(
        set(neutral(config).to_dict()) - HARMLESS - (APPLIED.keys() if choose else set())
    )
    values = {name: getattr(config, name) for name in names}
    return [
        _shown(name, value)
        for name, value in values.items()
        if value is not None
        and value is not False
        and value not in ([], {})
        and value != NEUTRAL.get(name)
    ]


def generation_notes(config: "GenerationConfig", choose: bool = False) -> tuple[str, ...]:
    """One sentence for settings that are not applied, one for sampling, as far as the model asks
    for them.

    ``choose``: the host can choose tokens, so that the manifest has the settings that it applies.
    """
    found = []
    if names := unapplied(config, choose):
        found.append(
            f"{NOT_APPLIED}: {', '.join(names)}: generate() of transformers gives other answers"
        )
    names = [name for name in SAMPLING if getattr(config, name) is not None]
    if choose:
        names = [name for name in names if name not in APPLIED]
    if config.do_sample and (names or not choose):
        chosen = [_shown(name, getattr(config, name)) for name in names]
        asked = f" ({', '.join(chosen)})" if chosen else ""
        does = "does not apply this" if choose else "decodes greedily"
        found.append(f"{GENERATION_CONFIG_FILE} asks for sampling{asked}; the bundle {does}")
    return tuple(found)


def _shown(name: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{name}={text if len(text) <= 60 else text[:60] + '..'}"
