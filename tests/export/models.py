"""Tiny random models as Hugging Face folders with a tokenizer, and adapters for them, made in a
second.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ssdevice.adapters.settings import AdapterSettings, BaseIdentity
from ssdevice.config import Mode, StreamConfig
from ssdevice.model.adapter import write_streams
from ssdevice.model.loading import build, load_hf

VOCAB = 300
LAYERS = 3
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of letters with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<end>", "<user>", "<assistant>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "pad_token": "<pad>"})
    )


def write_base(folder: Path, **values: object) -> Path:
    """A llama of three layers; its query, output and MLP weights are large enough to be quantized,
    keys' are not.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder)
    torch.manual_seed(0)
    sizes: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
    }
    hf = LlamaForCausalLM(LlamaConfig(**{**sizes, **values}))  # type: ignore[arg-type]
    with torch.no_grad():
        hf.model.embed_tokens.weight[0] = (
            0  # a padded row is all zeros, which quantization must survive
        )
    hf.save_pretrained(folder)
    return folder


def write_adapter(
    folder: Path,
    base: Path,
    mode: Mode = Mode.SHARED,
    gamma: int = 3,
    msa_layers: int = 2,
    **options: int,
) -> Path:
    """Streams with random identifiers and terms that do something; ``options``: of StreamConfig."""
    torch.manual_seed(1)
    hf = load_hf(base)
    config = StreamConfig(mode=mode, gamma=gamma, msa_layers=msa_layers, lora_rank=0, **options)
    model = build(hf, config, 128)
    assert model.streams is not None
    for name, value in model.streams.named_parameters():
        if name.endswith("up.weight") or (name.startswith("own.") and value.dim() > 1):
            torch.nn.init.normal_(value, std=0.1)
    write_streams(
        folder,
        model.streams,
        AdapterSettings("app", config, BaseIdentity.of(base, hf.config), "Do it."),
    )
    return folder


def write_own_tokenizer(adapter: Path, base: Path, template: str = TEMPLATE) -> Path:
    """Put the base's tokenizer into an adapter's folder, as trainers do, with another chat
    template.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes((base / name).read_bytes())
    (adapter / "chat_template.jinja").write_text(template)
    return adapter


def write_lora(folder: Path, base: Path, rank: int = 4, seed: int = 2, **options: object) -> Path:
    """A LoRA of PEFT that changes the model's words; ``options``: of PEFT's LoraConfig."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(**{"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **options})  # type: ignore[arg-type]
    model = get_peft_model(load_hf(base), config)
    for name, value in model.named_parameters():
        if "lora_B" in name or "lora_embedding_" in name:
            torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained(str(folder))
    return folder
