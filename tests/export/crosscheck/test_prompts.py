"""Prompt ids beside those of transformers: what is right passes, every planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors

from ssdevice.errors import ConfigError, InputError
from ssdevice.export.crosscheck.prompts import compare_prompts, special_names
from ssdevice.model.tokenizer import difference, open_tokenizer
from ssdevice.text.chat_template import ChatTemplate
from ssdevice.text.tokenizer import ChatTokenizer
from tests.text.families import ONE_QUESTION, WHOLE, WITH_TEXT_ARGUMENTS, WITH_TOOLS
from tests.text.test_tokenizer import CHATML, NAMED, TEMPLATES, TOKENIZERS, write_folder

pytest.importorskip("transformers", reason="the reference for prompts")

CONFIG: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}


def copy(name: str) -> Tokenizer:
    return Tokenizer.from_str(TOKENIZERS[name].to_str())


def write_llama(folder: Path, **config: Any) -> Path:
    """Its texts begin with a space behind special tokens too, which the class ``LlamaTokenizer``
    may not do.
    """
    tokenizer = copy("byte_fallback")
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    config = {"tokenizer_class": "LlamaTokenizer", **NAMED, **config}
    return write_folder(
        folder, tokenizer, CHATML, tokenizer_config=config, config={"model_type": "llama"}
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", [*TEMPLATES, None])
def test_a_right_tokenizer_passes(tmp_path: Path, template: str | None, name: str) -> None:
    folder = write_folder(tmp_path, TOKENIZERS[name], TEMPLATES[template] if template else None)
    assert compare_prompts(open_tokenizer(folder), folder) == ()


def test_what_a_tokenizer_puts_behind_every_text_is_no_part_of_a_plain_prompt(
    tmp_path: Path,
) -> None:
    tokenizer = copy("byte_level")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    folder = write_folder(tmp_path, tokenizer, None)
    assert compare_prompts(open_tokenizer(folder), folder) == ()


def test_special_tokens_that_a_normalizer_renames_are_no_text(tmp_path: Path) -> None:
    """The library shows them, as in the first Llamas, though the file calls them special."""
    content = json.loads(copy("byte_fallback").to_str())
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content |= {
        "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace_spaces]},
    }
    for token in content["added_tokens"]:
        token["normalized"] = True
    folder = write_folder(tmp_path, Tokenizer.from_str(json.dumps(content)), CHATML)
    assert compare_prompts(open_tokenizer(folder), folder) == ()


def lower(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]


def plain_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens(["  "])


def flag(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<|eot_id|>", rstrip=True)])


def shown(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=False, normalized=False)])


def spoken(tokenizer: Tokenizer) -> None:
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("two", "2")])  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lower, r"the prompt system: 'Be brief\.' / user: .* has the ids .*, with transformers"),
        (plain_spaces, 'the text "  two  spaces'),
        (flag, r"the text 'a <\|eot_id\|> b"),
        (shown, r"the ids of the text 'a <\|eot_id\|> b.* are shown as"),
        (spoken, r"""the ids of the text "  two  spaces.* are shown as "  2 """),
    ],
)
def test_another_tokenizer_is_named(
    tmp_path: Path, fault: Callable[[Tokenizer], None], message: str
) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML)
    right = open_tokenizer(folder)
    tokenizer = copy("byte_level")
    fault(tokenizer)
    with pytest.raises(
        InputError,
        match=rf"{folder.name}: the tokenizer differs from that of transformers: {message}",
    ):
        compare_prompts(ChatTokenizer(tokenizer, right.chat), folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("'\\n' }}", "'\\n\\n' }}"), "the prompt user: 'probe' has the ids"),
        (
            CHATML.replace("| trim", ""),
            r"the prompt user: 'probe' / assistant: 'an answer' / user: ' and more\\n' has",
        ),
        (
            "{%- if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
            "the prompt system: .* has the ids none, because the template refuses it, "
            "with transformers",
        ),
    ],
)
def test_another_template_is_named(tmp_path: Path, template: str, message: str) -> None:
    folder = write_folder(tmp_path / "right", TOKENIZERS["byte_level"], CHATML)
    wrong = open_tokenizer(write_folder(tmp_path / "wrong", TOKENIZERS["byte_level"], template))
    with pytest.raises(InputError, match=message):
        compare_prompts(wrong, folder)


TOOLS_ONLY = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
"""Writes tools, and nothing of calls, as the first Granites and LFM2."""


@pytest.mark.parametrize(
    "template", [TOOLS_ONLY, *WITH_TOOLS.values(), *WITH_TEXT_ARGUMENTS.values()]
)
def test_templates_with_tools_and_calls_pass(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], template)
    assert compare_prompts(open_tokenizer(folder), folder) == ()


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("<tool>", "<tools>", "a prompt with tools has the ids .*, with transformers"),
        ("<tool_response>", "<result>", "a prompt with a call and its result has the ids"),
        ("'\\n<tool_call>", "'\\n<call>", "a prompt with a call and its result has the ids"),
    ],
)
def test_a_template_that_writes_tools_otherwise_is_named(
    tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    template = WITH_TOOLS["hermes"]
    assert right in template
    folder = write_folder(tmp_path / "right", TOKENIZERS["byte_level"], template)
    changed = template.replace(right, wrong)
    other = open_tokenizer(write_folder(tmp_path / "wrong", TOKENIZERS["byte_level"], changed))
    with pytest.raises(InputError, match=message):
        compare_prompts(other, folder)


def test_a_template_for_tools_that_was_dropped_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], WHOLE["chatml"])
    (folder / "additional_chat_templates").mkdir()
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_text(WITH_TOOLS["hermes"])
    tokenizer = open_tokenizer(folder)
    assert compare_prompts(tokenizer, folder) == ()
    without = ChatTokenizer(tokenizer.tokenizer, replace(tokenizer.chat, tool_template=None))
    with pytest.raises(InputError, match="a prompt with tools has the ids none"):
        compare_prompts(without, folder)
    file.unlink()
    assert difference(tokenizer, open_tokenizer(folder)) == "chat templates for tools"


def test_a_renderer_that_ends_is_no_refusal_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], ONE_QUESTION["counted"])
    tokenizer = open_tokenizer(folder)

    def killed(*_: object, **__: object) -> None:
        raise ConfigError("the chat template broke the process that renders it (exit code -9)")

    monkeypatch.setattr(ChatTemplate, "render", killed)
    with pytest.raises(ConfigError, match=r"^the chat template broke .* \(exit code -9\)$"):
        compare_prompts(tokenizer, folder)


def test_every_listed_token_is_asked(tmp_path: Path) -> None:
    files = {
        "tokenizer_config": {
            **CONFIG,
            "added_tokens_decoder": {"400": {"content": "<a>"}},
            "image_token": "<b>",
            "extra_special_tokens": {"c_token": "<c>"},
            "additional_special_tokens": [{"content": "<d>"}, "<e>"],
            "add_bos_token": True,
            "model_max_length": 7,
            "pad_token": None,
        },
        "special_tokens_map": {"unk_token": {"content": "<f>", "lstrip": True}},
        "added_tokens": {"<g>": 500},
    }
    names = special_names(write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML, **files))
    assert set(names) >= {"<|im_start|>", "<s>", *(f"<{letter}>" for letter in "abcdefg")}
    assert not {"7", "True", "None", ""} & set(names)


@pytest.mark.parametrize("legacy", [False, True, None])
def test_a_class_that_does_not_read_its_file_is_a_note(tmp_path: Path, legacy: bool | None) -> None:
    """``LlamaTokenizer`` of transformers 5 splits texts by ``legacy`` and not as the model was
    trained.
    """
    folder = write_llama(tmp_path, **({} if legacy is None else {"legacy": legacy}))
    (note,) = compare_prompts(open_tokenizer(folder), folder)
    assert note.startswith(
        "LlamaTokenizer of transformers does not split texts as tokenizer.json says: the "
    )
    for options in (
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "TokenizersBackend"},
    ):
        assert compare_prompts(open_tokenizer(folder), write_llama(tmp_path, **options)) == ()


def test_faults_beside_such_a_class_are_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, legacy=False)
    right = open_tokenizer(folder)
    wrong = Tokenizer.from_str(right.tokenizer.to_str())
    wrong.add_tokens(["the"])
    with pytest.raises(InputError, match="differs from that of transformers"):
        compare_prompts(ChatTokenizer(wrong, right.chat), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_prefix_space": False}))
    with pytest.raises(
        InputError, match=r"'add_prefix_space' is False, and tokenizer\.json does not do so"
    ):
        compare_prompts(open_tokenizer(folder), folder)


def test_stops_and_plainness_are_not_prompts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML)
    right = open_tokenizer(folder)
    assert (
        compare_prompts(ChatTokenizer(right.tokenizer, replace(right.chat, stop_ids=(7,))), folder)
        == ()
    )


@pytest.mark.parametrize("asked", [False, True])
def test_an_option_that_the_file_fulfils_is_no_conflict(tmp_path: Path, asked: bool) -> None:
    """``Qwen2Tokenizer`` has words of its own; ``add_prefix_space`` is false in every Qwen."""
    config = {"tokenizer_class": "Qwen2Tokenizer", **NAMED, "add_prefix_space": asked}
    files: dict[str, Any] = {"tokenizer_config": config, "config": {"model_type": "qwen3"}}
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML, **files)
    if asked:
        with pytest.raises(InputError, match="'add_prefix_space' is True"):
            compare_prompts(open_tokenizer(folder), folder)
    else:
        assert "Qwen2Tokenizer" in compare_prompts(open_tokenizer(folder), folder)[0]
