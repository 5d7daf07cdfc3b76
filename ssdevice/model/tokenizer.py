"""The tokenizer of a Hugging Face folder or of an adapter, as transformers opens it.

``tokenizer.json`` counts as it was saved, because the model was trained with it: every version of
transformers saves the tokenizer that it uses. Special tokens, their flags and the chat template are
what transformers makes of all files together. Some classes (``LlamaTokenizer`` of transformers 5)
split texts in their own way instead of reading the file; they are asked for the names of special
tokens only.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.errors import ConfigError, InputError, TemplateRefusal, check_no_pointer, typed_line
from ssdevice.text.chat_template import (
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    read_eos_ids,
    read_object,
)
from ssdevice.text.frames import Message
from ssdevice.text.messages import Chat
from ssdevice.text.tokenizer import PROMPT, TOKENIZER_FILE, ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT = "default"
TOOL_USE = "tool_use"
"""transformers' names of a model's templates: the second is for conversations with tools."""
ADDED_TOKENS_FILE = "added_tokens.json"
SETTINGS_FILES = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE)
FILES = (TOKENIZER_FILE, *SETTINGS_FILES, TEMPLATE_FILE)
"""What transformers writes of a tokenizer beside a model or an adapter."""
CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    PROMPT,
    (
        *PROMPT,
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": " and more\n"},
    ),
    ({"role": "system", "content": "Be brief."}, *PROMPT),
    (
        {"role": "system", "content": "Be brief."},
        *PROMPT,
        {"role": "assistant", "content": "yes"},
        *PROMPT,
    ),
)
"""Of one turn and of three, with a system message and without."""
TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": 'Looks for <a word> & "more".',
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "What to look for."}},
                "required": ["word"],
            },
        },
    },
)
_CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probe", "arguments": '{"word": "naïve"}'},
}
CALLED: tuple[Message, ...] = (
    *PROMPT,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "a result", "tool_call_id": _CALL["id"]},
)
"""A conversation with a call and its result."""
OTHER_FORMAT = "app 'base' is given prompts in the format of the adapters' own tokenizer, which is not the model's"


def tokenizer_folder(model: Path, adapter: Path | None) -> Path:
    """The folder of the tokenizer for an adapter's prompts: its own if it brings one, else the
    model's.

    Raises ConfigError for an adapter with only a part of a tokenizer's files.
    """
    own = [name for name in FILES if adapter is not None and (adapter / name).is_file()]
    if adapter is None or not own:
        return model
    if TOKENIZER_FILE not in own:
        how = (
            f"save the whole tokenizer of the adapter there, or remove {own[0]} to use the model's"
        )
        raise ConfigError(
            f"{adapter}: {own[0]} without {TOKENIZER_FILE} is a part of a tokenizer: {how}"
        )
    return adapter


def open_tokenizer(model: Path, adapter: Path | None = None) -> ChatTokenizer:
    """The tokenizer and chat format of a model's folder, or of an adapter's that brings its own.

    Without a template prompts are used as they are (``plain``). Stop tokens are those of the
    model's ``generation_config.json`` (else ``config.json``), ``eos_token``, and the special token
    that the template puts after an answer. Raises ConfigError naming the file that is missing or
    wrong.
    """
    folder = tokenizer_folder(model, adapter)
    opened = as_shipped(folder, as_transformers(folder))
    _check_options(folder, opened)
    template = opened.chat_template
    tool_template = None
    if isinstance(template, dict):
        if DEFAULT not in template:
            raise ConfigError(
                f"{folder}: several chat templates and no default; write the one to use to "
                f"{folder / TEMPLATE_FILE}"
            )
        tool_template = template.get(TOOL_USE)
        template = template[DEFAULT]
    stops = [*read_eos_ids(model), *([opened.eos_token_id] if opened.eos_token is not None else [])]
    content = _hidden_as_special(opened.backend_tokenizer).to_str()
    return ChatTokenizer.of_model(
        content.encode(), folder, template, dict(opened.special_tokens_map), stops, tool_template
    )


def as_transformers(folder: Path) -> Any:
    """The ``AutoTokenizer`` of a folder; raises ConfigError.

    Code that the folder may hold is not run.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected a Hugging Face model folder")
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        how = "make one with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        raise ConfigError(f"{folder}: no {TOKENIZER_FILE}; {how}")
    check_no_pointer(file)
    try:
        opened = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each class raises what it likes
        for name in SETTINGS_FILES:  # these name the file at fault
            read_object(folder / name)
        load_tokenizer(file.read_bytes(), str(file))
        extra = read_object(folder / SPECIAL_TOKENS_FILE).get("additional_special_tokens")
        if isinstance(extra, list) and any(isinstance(token, dict) for token in extra):
            what = f"tables of flags, which transformers {version('transformers')} cannot open"
            how = f"list only texts there; flags belong into {TOKENIZER_FILE}"
            where = f"{folder / SPECIAL_TOKENS_FILE}: 'additional_special_tokens'"
            raise ConfigError(f"{where} has {what}: {how}") from error
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(
                f"{folder / TEMPLATE_FILE}: not UTF-8 text (byte {error.start})"
            ) from error
        raise ConfigError(
            f"{folder}: transformers cannot open its tokenizer ({typed_line(error)})"
        ) from error
    if not isinstance(opened, PreTrainedTokenizerFast):
        what = f"its tokenizer class {type(opened).__name__} does not use {TOKENIZER_FILE}"
        raise ConfigError(f"{folder}: {what}, and a bundle can hold no other tokenizer")
    return opened


def as_shipped(folder: Path, opened: Any) -> Any:
    """transformers' tokenizer with the splitting of ``tokenizer.json``, from one that may have
    built its own.
    """
    from transformers import PreTrainedTokenizerFast

    if type(opened) is PreTrainedTokenizerFast:
        return opened
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, **opened.special_tokens_map
        )
    except Exception as error:  # as above
        raise ConfigError(
            f"{folder / TOKENIZER_FILE}: transformers cannot read it ({typed_line(error)})"
        ) from error


def _check_options(folder: Path, opened: Any) -> None:
    """Raise ConfigError for options that ``tokenizer.json`` cannot hold."""
    if opened.split_special_tokens:
        what = "'split_special_tokens' would read the marks of the chat template as text"
        raise ConfigError(f"{folder / TOKENIZER_CONFIG_FILE}: {what}; set it to false")
    forced = opened.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    bpe = type(opened.backend_tokenizer.model).__name__ == "BPE"
    if opened.clean_up_tokenization_spaces and (forced or not bpe):
        what = "'clean_up_tokenization_spaces' takes back spaces that an answer has shown already"
        raise ConfigError(f"{folder / TOKENIZER_CONFIG_FILE}: {what}; set it to false")


def _hidden_as_special(backend: "Tokenizer") -> "Tokenizer":
    """A tokenizer whose flags say which tokens are no text: the library keeps it in mind when a
    file takes it back.
    """
    for i, token in backend.get_added_tokens_decoder().items():
        if not token.special and backend.decode([i]) != backend.decode(
            [i], skip_special_tokens=False
        ):
            token.special = True
            backend.add_special_tokens([token])
    return backend


def shared_tokenizer(
    model: Path, adapters: Sequence[Path | None], vocab: int
) -> tuple[ChatTokenizer, Path, tuple[str, ...]]:
    """The one tokenizer of a bundle, the folder it comes from, and notes for the user.

    ``adapters``: an app's adapter each, None for the base. ``vocab``: tokens of the model. Raises
    ConfigError for adapters that need different tokenizers, and for a tokenizer of another model.
    """
    folders = {adapter: tokenizer_folder(model, adapter) for adapter in adapters}
    (first, folder), *others = folders.items()
    tokenizer = open_tokenizer(model, first)
    check_vocabulary(tokenizer, vocab, folder)
    notes = [
        f"token {end} never ends an answer: the model has {vocab} tokens"
        for end in tokenizer.stop_ids
        if end >= vocab
    ]
    for other, its_folder in others:
        if its_folder == folder:
            continue
        its = open_tokenizer(model, other)
        what = difference(tokenizer, its) or difference(its, tokenizer)
        if what is not None and other is None:  # nobody asked for this app
            notes.append(OTHER_FORMAT)
        elif what is not None:
            raise ConfigError(
                f"{first} and {other} need different {what}, and a bundle has one: export them apart"
            )
    return tokenizer, folder, tuple(notes)


def check_vocabulary(tokenizer: ChatTokenizer, vocab: int, folder: Path) -> None:
    """Raise ConfigError for a tokenizer whose chat format needs tokens that a model of ``vocab``
    tokens has not.
    """
    if min(tokenizer.stop_ids) >= vocab:
        raise ConfigError(
            f"{folder}: no token that ends an answer is among the {vocab} of the model"
        )
    if beyond := [i for i in tokenizer.chat_ids(Chat(PROMPT)) if i >= vocab]:
        used = f"token {tokenizer.tokenizer.id_to_token(beyond[0])!r} with id {beyond[0]}"
        what = f"the chat format uses {used}, the model has {vocab} tokens"
        raise ConfigError(f"{folder}: {what}: this tokenizer belongs to another model")


def difference(one: ChatTokenizer, other: ChatTokenizer) -> str | None:
    """What gives prompts of ``other`` other ids than with ``one``, or ends its answers elsewhere;
    None if nothing.
    """
    if one.tokenizer_json != other.tokenizer_json:
        return "tokenizers"
    if any(
        prompt_ids(one, conversation) != prompt_ids(other, conversation)
        for conversation in CONVERSATIONS
    ):
        return "chat templates"
    if any(tool_ids(one, talk) != tool_ids(other, talk) for talk in (PROMPT, CALLED)):
        return "chat templates for tools"
    return None if set(other.stop_ids) <= set(one.stop_ids) else "tokens that end answers"


def prompt_ids(
    tokenizer: ChatTokenizer,
    conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int] | None:
    """The ids of a conversation before its next answer; None if the template refuses it.

    Raises InputError for tools, calls or results that the template does not read.
    """
    try:
        return tokenizer.chat_ids(Chat(tuple(conversation), tuple(tools)))
    except TemplateRefusal:
        return None


def tool_ids(tokenizer: ChatTokenizer, conversation: Sequence[Message]) -> list[int] | None:
    """The ids of a conversation with TOOLS; None if the template refuses it, or reads no tools."""
    try:
        return prompt_ids(tokenizer, conversation, TOOLS)
    except InputError:
        return None
