"""A tiny random model exported to ONNX: real graphs in seconds, once a test run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ssdevice.bundle.folder import Bundle, BundleWriter
from ssdevice.config import StreamConfig
from ssdevice.export.phrases import LEAST, phrase_table
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.phrases import FILE, ROLE
from ssdevice.runtime.session import Session
from ssdevice.text.tokenizer import Sample
from ssdevice.tree import Tree
from tests.once import made_once
from tests.runtime.scripted import TEMPLATE, make_tokenizer

APP = "letters"
TREE = Tree.of([[0], [1], [0, 0], [0, 0, 0]])
CONTEXT = 96
CHUNK = 8


@cache
def base_folder() -> Path:
    """A Hugging Face folder: two layers, a window of 24 tokens, one token a character."""
    return made_once("tiny/base", _write_base)


def _write_base(out: Path) -> None:
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=tokenizer.tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=24,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).save_pretrained(out)
    (out / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@cache
def adapter_folder(token_rank: int = 0) -> Path:
    """Streams that draft at random; with ``token_rank`` they see the token just chosen."""
    return made_once(f"tiny/adapter-{token_rank}", lambda out: _write_adapter(out, token_rank))


def _write_adapter(out: Path, token_rank: int) -> None:
    import torch
    from transformers import AutoConfig

    from ssdevice.adapters.settings import AdapterSettings, BaseIdentity
    from ssdevice.model.adapter import write_streams
    from ssdevice.model.loading import build, load_hf

    config = StreamConfig(gamma=3, msa_layers=1, lora_rank=0, token_rank=token_rank)
    streams = build(load_hf(base_folder()), config, CONTEXT).streams
    assert streams is not None
    torch.manual_seed(1)
    with torch.no_grad():
        for value in streams.parameters():
            value.copy_(torch.randn_like(value))
    identity = BaseIdentity.of(base_folder(), AutoConfig.from_pretrained(base_folder()))
    write_streams(out, streams, AdapterSettings(APP, config, identity, "Go on.", {}))


@cache
def tiny_bundle(
    quant: str = "fp32", streams: bool = True, repeats: int = 0, choose: bool = False
) -> Bundle:
    """The bundle in a precision.

    Without streams its step verifies ``repeats`` drafts of the host, if there are any.

    ``choose``: the host can choose tokens, too.
    """

    def export(out: Path) -> None:
        from ssdevice.export.plan import ExportOptions, Quant
        from ssdevice.export.stages import export_bundle

        options = ExportOptions(
            model=str(base_folder()),
            target="onnx",
            quant=Quant(quant),
            out=out,
            adapters=((APP, adapter_folder()),) if streams else (),
            tree=TREE if streams else Tree.chain(repeats),
            context=CONTEXT,
            chunk=CHUNK,
            choose=choose,
        )
        export_bundle(options, lambda *_: None)

    return Bundle.open(
        made_once(f"tiny/bundle-{quant}-{streams}-{repeats}{'-choose' * choose}", export)
    )


def bundle_with_a_phrase(out: Path, *, beyond: bool = False) -> tuple[Bundle, list[int], list[int]]:
    """A bundle without streams, a prompt of it and the first three tokens of the answer, of which
    its phrases say the second.

    ``beyond``: they say a token that the model does not have.
    """
    mine = tiny_bundle("int8", streams=False, repeats=4)
    vocab = mine.geometry.vocab
    with Session.open(mine, options=EngineOptions(threads=1, kernels=False)) as session:
        for prompt in ([token] for token in range(1, vocab)):
            answer = [
                token
                for run in session.runs(prompt, max_tokens=3, mode="plain")
                for token in run.tokens
            ]
            if len(answer) == 3:
                break
    table = phrase_table([Sample((*prompt, *answer[:2]), 1)] * LEAST, vocab)
    if beyond:
        table = (np.frombuffer(table, "<u4") | (1 << vocab.bit_length()) - 1).tobytes()
    return with_phrases(mine, out, table), prompt, answer


def with_phrases(bundle: Bundle, out: Path, table: bytes) -> Bundle:
    """A copy of a bundle with a table of phrases."""
    with BundleWriter(out) as writer:
        writer.add_bundle(bundle)
        writer.add_file(FILE, table, ROLE)
        return writer.commit(bundle.manifest)


def bundle_of_another_base(out: Path) -> Path:
    """A copy of the bundle whose manifest names other base weights."""
    mine = tiny_bundle()
    model = replace(mine.manifest.model, sha256="0" * 64)
    apps = tuple(replace(app, base_sha256=model.sha256) for app in mine.manifest.apps)
    with BundleWriter(out) as writer:
        writer.add_bundle(mine)
        writer.commit(replace(mine.manifest, model=model, apps=apps))
    return out
