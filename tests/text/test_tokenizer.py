"""Prompts as transformers renders them, and answers as text that never changes while it grows."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ssdevice.errors import ConfigError, InputError
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from ssdevice.text.stream import PATIENCE, StopStrings, TextOutput, TextStream, TokenTexts
from ssdevice.text.tokenizer import ChatTokenizer, user_content

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if tools is not none %}{{- raise_exception('no tools here') }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
INSTRUCT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""
TURNS = """{{ bos_token }}{% for message in messages %}{% if loop.index0 > 9 %}{% break %}{% endif %}
{% set ns = namespace(role=message.role) %}
{{ ns.role }}: {{ {'text': message.content} | tojson }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "turns": TURNS}
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEXTS = (
    "a simple answer",
    "  spaces around \n",
    "你好, 世界 🙂👩‍👩‍👧",
    "x < y & \"z\" 'q'",
    "\nline\n\nline",
)


def byte_level() -> Tokenizer:
    """A byte-level BPE like GPT-2's: characters beyond ASCII span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL],
    )
    tokenizer.train_from_iterator(
        ["the answer is the restaurant. 你好 你们 🙂 🙃 naïve"] * 4, trainer
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like BPE as Llama 2's: a mark for spaces, one token a byte for unknown
    characters.
    """
    pieces = [
        "<unk>",
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz.,",
    ]
    pairs = [("t", "h"), ("th", "e"), ("▁", "a"), ("▁", "the"), ("▁", "▁")]
    pieces += [a + b for a, b in pairs]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=pairs,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
            dropout=None,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template.encode())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def as_transformers(folder: Path, messages: list[dict[str, str]], generate: bool) -> list[int]:
    transformers = pytest.importorskip("transformers", reason="the reference for chat templates")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=generate)["input_ids"]
    )


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_equal_those_of_transformers(tmp_path: Path, template: str, tokenizer: str) -> None:
    folder = write_folder(tmp_path, TOKENIZERS[tokenizer], TEMPLATES[template])
    chat = open_tokenizer(folder)
    again = ChatTokenizer.from_bytes(chat.tokenizer_json, chat.chat)
    for text in TEXTS:
        user = {"role": "user", "content": f"Be brief.\n{text}"}
        expected = as_transformers(folder, [user], True)
        assert chat.prompt_ids(text, instruction="Be brief.") == expected
        assert again.prompt_ids(user_content("Be brief.", text)) == expected
        if template != "instruct":
            system = {"role": "system", "content": "You are a guide."}
            ids = chat.prompt_ids(text, instruction="Be brief.", system="You are a guide.")
            assert ids == as_transformers(folder, [system, user], True)
        whole = as_transformers(folder, [user, {"role": "assistant", "content": text}], False)
        answer = chat.completion_ids(text)
        assert answer[-1] in chat.stop_ids
        assert whole[: len(expected) + len(answer)] == [*expected, *answer]
        assert not set(whole[len(expected) + len(answer) :]) & set(chat.stop_ids)


def test_shipped_model_equals_transformers(repository: Path) -> None:
    folder = Path(os.environ.get("SSDEVICE_BASE_MODEL") or repository / "models" / "base-7m")
    if not folder.is_dir():
        pytest.skip(
            f"no model folder {folder.name}; set SSDEVICE_BASE_MODEL to one whose template takes a user turn"
        )
    chat = open_tokenizer(folder)
    for text in ("name[Aromi], food[French]", *TEXTS):
        user = {"role": "user", "content": f"Describe the restaurant.\n{text}"}
        prompt = chat.prompt_ids(text, instruction="Describe the restaurant.")
        assert prompt == as_transformers(folder, [user], True)
        whole = as_transformers(folder, [user, {"role": "assistant", "content": text}], False)
        assert [*prompt, *chat.completion_ids(text)] == whole
        assert chat.decode(chat.completion_ids(text)) == text


def test_answer_ends_at_the_stop_token_and_not_at_the_line_break_after_it(tmp_path: Path) -> None:
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML))
    end = TOKENIZERS["byte_level"].token_to_id("<|im_end|>")
    assert chat.completion_ids("yes") == [*chat.encode("yes"), end]
    # A stop token that the answer itself spells out does not end it early.
    assert chat.completion_ids("a<|im_end|>b") == [*chat.encode("a<|im_end|>b"), end]


def test_answer_of_a_template_that_opens_it_differently_or_never_ends_it(tmp_path: Path) -> None:
    opens = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], opens))
    assert chat.completion_ids("yes") == chat.encode("yes</s>")
    endless = "{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], endless))
    assert chat.completion_ids("yes") == chat.encode("yes|</s>")


def test_stop_tokens_come_from_every_place_that_names_one(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    eos = tokenizer.token_to_id("</s>")
    turn = tokenizer.token_to_id("<|im_end|>")
    folder = write_folder(tmp_path, tokenizer, CHATML)
    assert open_tokenizer(folder).stop_ids == (eos, turn)
    write_folder(folder, tokenizer, CHATML, config={"eos_token_id": 5})
    assert open_tokenizer(folder).stop_ids == (5, eos, turn)
    write_folder(folder, tokenizer, CHATML, config={"text_config": {"eos_token_id": 6}})
    assert open_tokenizer(folder).stop_ids == (6, eos, turn)
    write_folder(folder, tokenizer, CHATML, generation_config={"eos_token_id": [turn, 9]})
    assert open_tokenizer(folder).stop_ids == (turn, 9, eos)
    for wrong in ("x", [True], -1, [1.5]):
        write_folder(folder, tokenizer, CHATML, generation_config={"eos_token_id": wrong})
        with pytest.raises(ConfigError, match=r"generation_config\.json: 'eos_token_id'"):
            open_tokenizer(folder)


def test_template_is_found_where_older_folders_keep_it(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    expected = open_tokenizer(write_folder(tmp_path / "new", tokenizer, CHATML)).prompt_ids("hi")
    for template in (CHATML, named):
        config = {**NAMED, "chat_template": template}
        chat = open_tokenizer(
            write_folder(tmp_path / "old", tokenizer, None, tokenizer_config=config)
        )
        assert chat.prompt_ids("hi") == expected
    named[1]["name"] = "rag"
    with pytest.raises(ConfigError, match="several chat templates and no default"):
        open_tokenizer(write_folder(tmp_path / "old", tokenizer, None, tokenizer_config=config))


def test_template_variables_reach_the_template(tmp_path: Path) -> None:
    template = (
        CHATML + "{% if add_generation_prompt and enable_thinking is false %}no thoughts{% endif %}"
    )
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"], template)
    plain = open_tokenizer(folder)
    form = dataclasses.replace(plain.chat, variables={"enable_thinking": False})
    for stored in (form.framed(), dataclasses.replace(form, frames=None)):
        chat = ChatTokenizer(plain.tokenizer, stored)
        assert chat.decode(chat.prompt_ids("hi")[len(plain.prompt_ids("hi")) :]) == "no thoughts"


def test_folders_that_cannot_be_used_say_what_is_missing(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ConfigError, match="no such folder"):
        open_tokenizer(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json; make one with transformers"):
        open_tokenizer(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no stop token"):
        open_tokenizer(
            write_folder(
                tmp_path / "endless", tokenizer, "{{ messages[-1].content }}", tokenizer_config={}
            )
        )
    with pytest.raises(
        ConfigError, match=r"bos: transformers cannot open its tokenizer \(TypeError: .* bos_token"
    ):
        open_tokenizer(
            write_folder(tmp_path / "bos", tokenizer, CHATML, tokenizer_config={"bos_token": 3})
        )
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: expected a JSON object"):
        open_tokenizer(write_folder(tmp_path / "list", tokenizer, CHATML, tokenizer_config=[]))
    folder = write_folder(tmp_path / "damaged", tokenizer, CHATML)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        open_tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: not UTF-8"):
        open_tokenizer(folder)


def test_prompts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], INSTRUCT))
    for prompt in ("", " \n"):
        with pytest.raises(InputError, match="the prompt is empty"):
            chat.prompt_ids(prompt)
    with pytest.raises(InputError, match="not valid Unicode"):
        chat.prompt_ids("half \ud800")
    with pytest.raises(ConfigError, match="takes no system message as message 1"):
        chat.prompt_ids("hi", system="be brief")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
        "{{ 'a' + 1 }}",
        "{{ none() }}",
        "{% include 'other' %}",
    ],
)
def test_templates_stay_in_their_sandbox(source: str) -> None:
    template = ChatTemplate(ChatFormat(source, {}, (1,)))
    with pytest.raises(ConfigError, match="refuses a conversation of user"):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True)


def test_formats_that_cannot_be_used_are_refused() -> None:
    for source in ("{% for %}", "{% if x %}", "{{ x | nosuchfilter }}"):
        with pytest.raises(ConfigError, match="not valid jinja2"):
            ChatTemplate(ChatFormat(source, {}, (1,)))
    with pytest.raises(ConfigError, match="at most"):
        ChatFormat("x" * (1 << 21), {}, (1,))
    for stop in (-1, True, "1"):
        with pytest.raises(ConfigError, match="stop token id"):
            ChatFormat("x", {}, (stop,))  # type: ignore[arg-type]


# Text streams.

# The character that stands for each byte in a byte-level vocabulary: itself, or one from U+0100 on.
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTERS = [
    chr(byte) if byte in PRINTABLE else chr(256 + OTHERS.index(byte)) for byte in range(256)
]

WORDS = st.sampled_from(
    ["the", " answer", " ", "  ", "\n", "你好", "🙂", "👩‍👩‍👧", "naïve", "é", "\ufffd", "a", "."]
)
UNICODE = st.one_of(st.lists(WORDS, max_size=12).map("".join), st.text(max_size=30))


def runs_of(ids: list[int], data: st.DataObject) -> list[list[int]]:
    runs = []
    while ids:
        size = data.draw(st.integers(1, 5))
        runs.append(ids[:size])
        ids = ids[size:]
    return runs


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=UNICODE, data=st.data())
def test_pieces_concatenate_to_the_whole_text(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(
        data.draw(st.integers(0, 2))
    ):  # special tokens leave no trace, also at the beginning of words
        ids.insert(data.draw(st.integers(0, len(ids))), tokenizer.token_to_id("<|im_end|>"))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assume(
        name == "byte_level" or whole.count("\ufffd") == text.count("\ufffd")
    )  # a special token split a character
    stream = TextStream(TokenTexts(tokenizer))
    given_out = ""
    for run in runs_of(ids, data):
        piece = stream.push(run)
        given_out += piece
        assert whole.startswith(given_out)
        assert not piece.endswith("\ufffd")
    assert given_out + stream.flush() == whole
    assert stream.flush() == "" and stream.push([]) == ""


@given(values=st.lists(st.integers(0, 339), max_size=60), data=st.data())
def test_any_ids_of_a_byte_level_tokenizer_give_their_text(
    values: list[int], data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    stream = TextStream(TokenTexts(tokenizer))
    pieces = [stream.push(run) for run in runs_of(values, data)]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(values, skip_special_tokens=True)


@given(
    values=st.lists(
        st.sampled_from([0xFF, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0x41]), max_size=80
    )
)
@example([0xFF] * 80)
@example([0xF0, 0x9F] * 40)
@example([0xFF] * 15 + [0x41] + [0xFF] * 15)
def test_broken_bytes_give_their_text_and_do_not_pile_up(values: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.token_to_id(CHARACTERS[value]) for value in values]
    stream = TextStream(TokenTexts(tokenizer))
    text = ""
    for i in ids:
        text += stream.push([i])
        assert len(stream._ids) <= 2 * PATIENCE  # settled ones, and those waiting for a clean end
    assert text + stream.flush() == bytes(values).decode("utf-8", "replace")


def test_characters_over_several_tokens_appear_whole() -> None:
    for name, tokenizer in TOKENIZERS.items():
        stream = TextStream(TokenTexts(tokenizer))
        pieces = [
            stream.push([i]) for i in tokenizer.encode("a 🙂 b", add_special_tokens=False).ids
        ]
        assert "".join(pieces) + stream.flush() == "a 🙂 b", name
        assert [piece.strip() for piece in pieces if "🙂" in piece] == ["🙂"], name


def test_work_per_token_does_not_grow_with_the_answer() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    longest = 0

    class Counting:
        get_added_tokens_decoder = tokenizer.get_added_tokens_decoder
        id_to_token = tokenizer.id_to_token
        decoder = tokenizer.decoder

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    text = "the answer 你好 🙂 " * 50
    stream = TextStream(TokenTexts(Counting()))  # type: ignore[arg-type]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream.push([i]) for i in ids) + stream.flush() == text
    assert longest < 20 < len(ids)


# Stop strings.


@given(
    text=st.text("ab\n", max_size=24),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_the_first_stop_string_is_found_however_text_arrives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    finder = StopStrings(stops)
    given_out = ""
    rest = text
    while rest:
        size = data.draw(st.integers(1, 6))
        given_out += finder.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(given_out)
    assert given_out + finder.flush() == expected
    assert (finder.stop is not None) == bool(ends)


def test_text_that_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert [finder.push(piece) for piece in ("one\n", "two\n\n", "Us", "e it\n")] == [
        "one",
        "\ntwo",
        "",
        "\n\nUse it",
    ]
    assert finder.flush() == "\n" and finder.stop is None
    with pytest.raises(ConfigError, match="stop string is empty"):
        StopStrings(["a", ""])


@given(data=st.data())
def test_an_answer_ends_at_the_same_token_whatever_the_runs(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    eos = tokenizer.token_to_id("</s>")
    ids = tokenizer.encode("the answer: 你好. 🙂 the end", add_special_tokens=False).ids
    ids.insert(data.draw(st.integers(0, len(ids))), eos)
    stops = data.draw(
        st.lists(st.sampled_from([": ", "好", "🙂", "the e", "zz", "er"]), max_size=3)
    )

    def output(runs: list[list[int]]) -> tuple[str, int, bool, str | None]:
        answer = TextOutput(TextStream(TokenTexts(tokenizer)), [eos], StopStrings(stops))
        text = ""
        used = 0
        for run in runs:
            emission = answer.push(run)
            text, used = text + emission.text, used + emission.used
            assert emission.used == len(run) or emission.stopped
        return text + answer.finish(), used, answer.stopped, answer.stop

    one_by_one = output([[i] for i in ids])
    assert output(runs_of(ids, data)) == one_by_one
    text, used, stopped, stop = one_by_one
    assert stopped
    before = tokenizer.decode(ids[:used], skip_special_tokens=True)
    assert before.startswith(text)
    assert ids[used - 1] == eos if stop is None else before[len(text) :].startswith(stop)


@pytest.mark.parametrize(
    "stops",
    [
        ["<|eot_id|>"],
        ["the<|eot_id|>"],
        ["<|eot_id|>a"],
        ["<|eot_id|><|im_end|>"],
        ["id|>"],
        ["r<|e"],
        ["<|im"],
        ["<|im_end|>", "the answer"],
        ["thea"],
        ["|><|"],
    ],
)
def test_special_tokens_stop_where_generate_of_transformers_stops(stops: list[str]) -> None:
    generation = pytest.importorskip(
        "transformers.generation", reason="the reference for stop strings"
    )
    torch = pytest.importorskip("torch")
    tokenizer = TOKENIZERS["byte_level"]
    reference = generation.StopStringCriteria(_fast(tokenizer), stops)
    rng = Random(0)
    words = [
        "<|eot_id|>",
        "<|im_end|>",
        "<s>",
        "the",
        "the",
        " answer",
        "a",
        " <|",
        "id|>",
        "<|eot",
        "_id",
    ]
    words += words[:2]
    found = 0
    for _ in range(60):
        chosen = "".join(rng.choices(words, k=12))
        ids = tokenizer.encode(chosen, add_special_tokens=False).ids
        ends = (
            n for n in range(1, len(ids) + 1) if bool(reference(torch.tensor([ids[:n]]), None)[0])
        )
        expected = next(ends, None)
        answer = TextOutput(TextStream(TokenTexts(tokenizer)), [], StopStrings(stops))
        emission = answer.push(ids)
        text = emission.text + ("" if emission.stopped else answer.finish())
        assert (emission.used if emission.stopped else None) == expected
        written = tokenizer.decode(ids[:expected], skip_special_tokens=False)
        first = min(
            (written.index(stop) for stop in stops if stop in written), default=len(written)
        )
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith(text)
        assert len(text) <= first, "marks of special tokens are not shown"
        assert expected is not None or text == tokenizer.decode(ids, skip_special_tokens=True)
        found += expected is not None
    assert found > 2


def _fast(tokenizer: Tokenizer) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stop_inside_an_accepted_run_names_its_token(tmp_path: Path) -> None:
    chat = open_tokenizer(write_folder(tmp_path, TOKENIZERS["byte_level"], CHATML))
    run = chat.encode("ab;c")
    emission = chat.output([";"]).push(run)
    assert (emission.text, emission.used, emission.stopped) == ("ab", 3, True)
    answer = chat.output()
    assert answer.push([*chat.encode("ab"), chat.stop_ids[0], *chat.encode("c")]).used == 3
    assert (answer.push(run).used, answer.finish(), answer.stop) == (0, "", None)


def test_user_content_puts_the_instruction_on_its_own_line() -> None:
    assert (
        user_content("Solve the problem step by step.", "1 + 1?")
        == "Solve the problem step by step.\n1 + 1?"
    )
    assert user_content(None, "hi") == user_content("", "hi") == "hi"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [" a the b", "the a", "🙂é 你", "\ufffd a", " ", "a\ufffd"])
def test_tokens_said_one_by_one_are_the_text(name: str, text: str) -> None:
    """Also where a tokenizer leaves out the space before the first token, and where a character
    spans tokens.
    """
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    said = [texts.said(token, at == 0) for at, token in enumerate(ids)]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert b"".join(content for _, content in said).decode() == whole
    if all(content == each.encode() for each, content in said):
        assert "".join(each for each, _ in said) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["the answer", "a.", "", "你", "the "])
def test_an_answer_goes_on_where_its_prompt_ends(name: str, prompt: str) -> None:
    """As the ids say: the text of both less that of the prompt, however the tokens arrive."""
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    before = tokenizer.encode(prompt, add_special_tokens=False).ids
    for answer in (" the answer", "the", " 🙂 the", "\n the", "."):
        # after a line break no tokenizer puts a space that is not there
        whole = tokenizer.encode(f"x\n{answer}", add_special_tokens=False).ids
        start = tokenizer.encode("x\n", add_special_tokens=False).ids
        ids = whole[len(start) :]
        expected = tokenizer.decode([*(before or start), *ids])
        expected = expected[len(tokenizer.decode(before or start)) :]
        for size in (1, 2, len(ids)):
            stream = TextStream(texts, before)
            pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
            assert "".join(pieces) + stream.flush() == expected, (answer, size)
