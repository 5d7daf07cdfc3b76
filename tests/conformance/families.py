"""Models of every family wide enough that INT4 quantizes them, with a LoRA and streams, as their
users have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ssdevice.model.families import family_of
from tests.export.models import write_adapter, write_lora, write_tokenizer
from tests.model.tiny import MODELS, SEEDS, randomise, tiny_config

WIDTH = 512
LAYERS = 2
HEADS = 8
TOKENS = 24
PROMPT = [7, 21, 3, 44, 9, 30, 12]


def wide_config(name: str) -> Any:
    """The config of ``tests.model.tiny`` in another size."""
    model_type, values = MODELS[name]
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "eos_token_id": 1,
        ("ffn_dim" if model_type == "opt" else "intermediate_size"): 2 * WIDTH,
    }
    for key, value in values.items():
        if key in ("layer_types", "no_rope_layers"):
            sizes[key] = value[:LAYERS]
        elif key == "head_dim":
            sizes[key] = WIDTH // HEADS
        elif key == "max_window_layers":
            sizes[key] = LAYERS - 1
        elif key == "original_max_position_embeddings":
            sizes[key] = 2 * value
        elif key == "word_embed_proj_dim":
            sizes[key] = value * WIDTH // 32
        elif key == "rope_parameters":
            sizes[key] = {k: _factors(v) if isinstance(v, list) else v for k, v in value.items()}
    return tiny_config(model_type, **{**values, **sizes})


def _factors(few: Sequence[float]) -> list[float]:
    """As many as half a head has channels, in the range of these."""
    return torch.linspace(few[0], few[-1], WIDTH // HEADS // 2).tolist()


def write_family(folder: Path, name: str) -> Path:
    """``base`` and ``adapter`` below the folder, of a model that says more than one word over and
    over.
    """
    from transformers import AutoModelForCausalLM

    base = folder / "base"
    adapter = folder / "adapter"
    write_tokenizer(base)
    for attempt in count():
        hf = AutoModelForCausalLM.from_config(wide_config(name), attn_implementation="eager")
        randomise(hf, SEEDS.get(name, 0))
        with torch.no_grad():  # tokens that biases drown are all followed by the same
            for path, value in hf.named_parameters():
                value.mul_(4**attempt if "embed" in path else 1)
        hf.save_pretrained(base)
        layers = hf.get_submodule(family_of(hf.config.model_type).layers_path)
        linears = {
            path.rpartition(".")[2]
            for path, part in layers.named_modules()
            if isinstance(part, torch.nn.Linear)
        }
        write_lora(write_adapter(adapter, base, msa_layers=1), base, target_modules=sorted(linears))
        if len(set(generated(folder))) > TOKENS // 6:
            return folder
    raise AssertionError


def generated(folder: Path) -> list[int]:
    """What ``generate`` of transformers says with PEFT's adapter beside the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", attn_implementation="eager", dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens
