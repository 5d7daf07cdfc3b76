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
"""Conversations of one turn and of three, with a system message and without."""
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
OTHER_FORMAT = (
    "app 'base' is given prompts in the format of the adapters' own tokenizer, "
    "which is not the model's"
)


def tokenizer_folder(model: Path, adapter: Path | None) -> Path:
    """The folder of the tokenizer for an adapter's prompts: its own if it brings one, else the
    model's.

    Raises ConfigError for an adapter with only a part of a tokenizer's files.
    """
    if adapter is None:
        return model
    own = [name for name in FILES if (adapter / name).is_file()]
    if not own:
        return model
    if TOKENIZER_FILE not in own:
        raise ConfigError(
            f"{adapter}: {own[0]} without {TOKENIZER_FILE} is a part of a tokenizer: save the "
            f"whole tokenizer of the adapter there, or remove {own[0]} to use the model's"
        )
    return adapter


def open_tokenizer(model: Path, adapter: Path | None = None) -> ChatTokenizer:
    """The tokenizer and chat format of a model's folder, or of an adapter's that brings its own.

    Without a template prompts are used as they are (``plain``). Stop tokens are those of the
    model's ``generation_config.json`` (else ``config.json``), ``eos_token``, and the special token
    that the template puts after an answer.

    Raises ConfigError, which names the file that is missing or wrong.
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
    stops = list(read_eos_ids(model))
    if opened.eos_token is not None:
        stops.append(opened.eos_token_id)
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
        raise ConfigError(
            f"{folder}: no {TOKENIZER_FILE}; make one with transformers: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    check_no_pointer(file)
    try:
        opened = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each class raises what it likes
        raise _cannot_open(folder, error) from error
    if not isinstance(opened, PreTrainedTokenizerFast):
        raise ConfigError(
            f"{folder}: its tokenizer class {type(opened).__name__} does not use {TOKENIZER_FILE}, "
            "and a bundle can hold no other tokenizer"
        )
    return opened


def _cannot_open(folder: Path, error: Exception) -> ConfigError:
    """The error that names what is wrong in a folder, whose tokenizer transformers cannot open.

    ``error``: transformers' own. Raises ConfigError itself if a file can be read by nobody.
    """
    for name in SETTINGS_FILES:
        read_object(folder / name)
    file = folder / TOKENIZER_FILE
    load_tokenizer(file.read_bytes(), str(file))
    special = folder / SPECIAL_TOKENS_FILE
    extra = read_object(special).get("additional_special_tokens")
    if isinstance(extra, list) and any(isinstance(token, dict) for token in extra):
        return ConfigError(
            f"{special}: 'additional_special_tokens' has tables of flags, which transformers "
            f"{version('transformers')} cannot open: list only texts there; flags belong into "
            f"{TOKENIZER_FILE}"
        )
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(f"{folder / TEMPLATE_FILE}: not UTF-8 text (byte {error.start})")
    return ConfigError(f"{folder}: transformers cannot open its tokenizer ({typed_line(error)})")


def as_shipped(folder: Path, opened: Any) -> Any:
    """transformers' tokenizer that splits texts as ``tokenizer.json`` says.

    ``opened``: one that may split them in its own way.
    """
    from transformers import PreTrainedTokenizerFast

    if type(opened) is PreTrainedTokenizerFast:
        return opened
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, **opened.special_tokens_map
        )
    except Exception as error:  # each class raises what it likes
        raise ConfigError(
            f"{folder / TOKENIZER_FILE}: transformers cannot read it ({typed_line(error)})"
        ) from error


def _check_options(folder: Path, opened: Any) -> None:
    """Raise ConfigError for options that ``tokenizer.json`` cannot hold."""
    file = folder / TOKENIZER_CONFIG_FILE
    if opened.split_special_tokens:
        raise ConfigError(
            f"{file}: 'split_special_tokens' would read the marks of the chat template as text; "
            "set it to false"
        )
    forced = opened.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    bpe = type(opened.backend_tokenizer.model).__name__ == "BPE"
    if opened.clean_up_tokenization_spaces and (forced or not bpe):
        raise ConfigError(
            f"{file}: 'clean_up_tokenization_spaces' takes back spaces that an answer has shown "
            "already; set it to false"
        )


def _hidden_as_special(backend: "Tokenizer") -> "Tokenizer":
    """A tokenizer whose flags say which tokens are no text.

    The library leaves out every token that was ever special, even if a file then says that it is
    not; a file written from it would not say so.
    """
    for i, token in backend.get_added_tokens_decoder().items():
        if token.special:
            continue
        left_out = backend.decode([i]) != backend.decode([i], skip_special_tokens=False)
        if left_out:
            token.special = True
            backend.add_special_tokens([token])
    return backend


def shared_tokenizer(
    model: Path, adapters: Sequence[Path | None], vocab: int
) -> tuple[ChatTokenizer, Path, tuple[str, ...]]:
    """The one tokenizer of a bundle, the folder it comes from, and notes for the user.

    ``adapters``: an app's adapter each, None for the base. ``vocab``: tokens of the model.

    Raises ConfigError for adapters that need different tokenizers, and for a tokenizer of another
    model.
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
        if what is None:
            continue
        if other is not None:
            raise ConfigError(
                f"{first} and {other} need different {what}, and a bundle has one: "
                "export them apart"
            )
        # Nobody asked for the app of the bare base, so it is no error.
        notes.append(OTHER_FORMAT)
    return tokenizer, folder, tuple(notes)


def check_vocabulary(tokenizer: ChatTokenizer, vocab: int, folder: Path) -> None:
    """Raise ConfigError for a tokenizer whose chat format needs tokens that the model lacks.

    ``vocab``: tokens of the model.
    """
    if min(tokenizer.stop_ids) >= vocab:
        raise ConfigError(
            f"{folder}: no token that ends an answer is among the {vocab} of the model"
        )
    for i in tokenizer.chat_ids(Chat(PROMPT)):
        if i >= vocab:
            token = tokenizer.tokenizer.id_to_token(i)
            raise ConfigError(
                f"{folder}: the chat format uses token {token!r} with id {i}, the model has "
                f"{vocab} tokens: this tokenizer belongs to another model"
            )


def difference(one: ChatTokenizer, other: ChatTokenizer) -> str | None:
    """What makes ``one`` no replacement of ``other``; None if nothing does.

    It would give prompts other ids, or not end answers where ``other`` does.
    """
    if one.tokenizer_json != other.tokenizer_json:
        return "tokenizers"
    for conversation in CONVERSATIONS:
        if prompt_ids(one, conversation) != prompt_ids(other, conversation):
            return "chat templates"
    for conversation in (PROMPT, CALLED):
        if tool_ids(one, conversation) != tool_ids(other, conversation):
            return "chat templates for tools"
    if not set(other.stop_ids) <= set(one.stop_ids):
        return "tokens that end answers"
    return None


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
