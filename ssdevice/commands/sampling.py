"""Arguments of how tokens are chosen, for the commands that answer prompts."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ssdevice import strict_json
from ssdevice.bundle.folder import Bundle
from ssdevice.commands.opening import (
    add_engine,
    add_special_tokens,
    add_verify_at,
    positive,
    refuse_ignored,
)
from ssdevice.errors import InputError, reading
from ssdevice.runtime.sampling.options import DRAWING, Sampling
from ssdevice.runtime.sampling.structure import Structure

HELP = {
    "temperature": (float, "0 chooses the likeliest token; above, tokens are sampled"),
    "top_k": (int, "sample among the N likeliest tokens"),
    "top_p": (float, "sample among the likeliest tokens that have this probability together"),
    "min_p": (
        float,
        "sample among tokens of at least this part of the likeliest one's probability",
    ),
    "typical_p": (
        float,
        "sample among the most typical tokens that have this probability together",
    ),
    "repetition_penalty": (
        float,
        "divide the logits of tokens that occurred (negative ones: multiply)",
    ),
    "presence_penalty": (float, "subtract this from the logits of tokens that the answer has"),
    "frequency_penalty": (float, "subtract this as often as the answer has a token"),
    "no_repeat_ngram_size": (int, "no N tokens in a row occur twice"),
    "min_new_tokens": (int, "no answer is shorter"),
    "min_length": (int, "prompt and answer together are not shorter"),
    "seed": (int, "the same seed gives the same answer, in every mode (default 0)"),
    "typical_acceptance": (
        float,
        "INEXACT, changes the text: accept drafts by Medusa's threshold, such as 0.09",
    ),
    "logprobs": (int, "with --json: log-probabilities of each token and of the N likeliest"),
}

FILE = "FILE"
STRUCTURES: dict[str, tuple[str, str, Callable[[Any], Structure]]] = {
    "json_schema": (FILE, "answer in JSON that fits this JSON schema", Structure.json_schema),
    "json_object": ("", "answer with a JSON object", lambda _: Structure.json_object()),
    "regex": (
        "RE",
        "answer with text that this regular expression matches as a whole",
        Structure.regex,
    ),
    "grammar": (
        FILE,
        "answer in the language of this Lark grammar, such as FILE.lark",
        Structure.lark,
    ),
}
"""By field of the options: the value that is given, its help, and what makes the structure."""
MAX_STRUCTURE_BYTES = 4 << 20


def add_answers(parser: argparse.ArgumentParser, most: int) -> None:
    """Declare what answers need; they end after ``most`` tokens by default."""
    add = parser.add_argument
    add(
        "--template-arg",
        type=_named_json,
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="argument of the chat template, such as enable_thinking=false; may be repeated",
    )
    add(
        "--max-tokens",
        type=positive,
        default=most,
        metavar="N",
        help=f"end an answer here (default {most})",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be repeated",
    )
    add(
        "--no-speculate",
        action="store_true",
        help="plain decoding: the same answers, token by token",
    )
    add_special_tokens(parser)
    add_sampling(parser)
    add_verify_at(parser)
    add_engine(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "choice of tokens",
        "for bundles that were exported with --choose host. Without these options the likeliest "
        f"token is chosen; once one of --sample, {', '.join(map(flag, DRAWING))} is given, what "
        "the others do not say is as the model's generation_config.json recommends, and the "
        "temperature 1 where it names none",
    )
    add = group.add_argument
    add("--sample", action="store_true", help="sample as the model recommends")
    for name, (kind, text) in HELP.items():
        add(flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    add(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="add X to a token's logit",
    )
    form = group.add_mutually_exclusive_group()
    for name, (value, text, _) in STRUCTURES.items():
        if not value:
            form.add_argument(flag(name), action="store_true", help=text)
            continue
        kind = Path if value == FILE else str
        form.add_argument(flag(name), type=kind, metavar=value, help=text)


def sampling_of(args: argparse.Namespace, bundle: Bundle | None = None) -> Sampling | None:
    """The sampling that was asked for; None for greedy decoding.

    Without a ``bundle`` it only checks the options. Raises InputError for a value out of range, and
    for options that would have no effect.
    """
    given: dict[str, Any] = {each.name: getattr(args, each.name, None) for each in fields(Sampling)}
    given |= {"logit_bias": dict(args.logit_bias), "structure": _structure_of(args)}
    asked = {name: value for name, value in given.items() if value not in (None, {})}
    if getattr(args, "verify_at", None) and (asked or args.sample):
        raise InputError(
            "--verify-at: the server's greedy tokens are verified; leave out how tokens are chosen"
        )
    model = bundle.manifest.sampling if bundle is not None else None
    if getattr(args, "no_speculate", False):
        refuse_ignored(args, "--no-speculate accepts no drafts", flag("typical_acceptance"))
    if args.temperature == 0:
        refuse_ignored(
            args, "--temperature 0 chooses the likeliest token", "--sample", *map(flag, DRAWING[1:])
        )
    elif args.sample or Sampling.draws(asked):
        return Sampling.sampled(model, **asked)
    elif not asked and model is not None and not args.quiet:
        named = ", ".join(f"{name}={value}" for name, value in model.named().items())
        print(
            f"ssdevice: the model recommends sampling ({named[:200]}); --sample does so",
            file=sys.stderr,
        )
    return Sampling(**asked) if asked else None


def _structure_of(args: argparse.Namespace) -> Structure | None:
    for name, (value, _, make) in STRUCTURES.items():
        given = getattr(args, name)
        if given in (None, False):
            continue
        return _named(given, make) if value == FILE else make(given)
    return None


def _named(file: Path, make: Callable[[str], Structure]) -> Structure:
    """The structure in a file; errors name it."""
    with reading(file), file.open("rb") as stream:
        content = stream.read(MAX_STRUCTURE_BYTES)  # more than any structure may have
    try:
        return make(strict_json.utf8(content, str(file)))
    except InputError as error:
        raise InputError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error


def flag(name: str) -> str:
    """The option for a field of Sampling."""
    return f"--{name.replace('_', '-')}"


def _bias(text: str) -> tuple[int, float]:
    token, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, a token id and a number")
    return int(token), float(value)


def _named_json(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=JSON")
    try:
        return name, strict_json.parse(value, name)
    except InputError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: not JSON; write a text as {name}='\"text\"'"
        ) from None
