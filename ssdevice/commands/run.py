"""``ssdevice run``: decode prompts with a bundle."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ssdevice.commands.opening import add_bundle, open_session, positive, refuse_ignored
from ssdevice.commands.sampling import add_answers, sampling_of
from ssdevice.config import read_json
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError
from ssdevice.progress import count
from ssdevice.runtime.generation import Generation, Run, accepted_path
from ssdevice.runtime.session import Session
from ssdevice.strict_json import utf8
from ssdevice.text.messages import checked
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_bundle(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", help="the prompt; - reads it from standard input"
    )
    source.add_argument(
        "--data", type=Path, metavar="FILE", help="JSON Lines of prompts, answered one by one"
    )
    source.add_argument(
        "--messages", type=Path, metavar="FILE", help="JSON list of the messages of a conversation"
    )
    add("--system", metavar="TEXT", help="system message before the prompt or the messages")
    add("--limit", type=positive, metavar="N", help="the first N prompts of --data")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--trace", action="store_true", help="show what every step accepted and rejected"
    )
    form.add_argument("--json", action="store_true", help="print one JSON object per prompt")
    add_answers(parser, 256)


def run(args: argparse.Namespace) -> int:
    """Answer every prompt on standard output, with statistics on standard error."""
    if args.system is not None and args.data is not None:
        raise InputError(
            "--system goes with --prompt and --messages; a data file names its own system messages"
        )
    if args.data is None:
        refuse_ignored(args, "it goes with --data", "--limit")
    if not args.json:
        refuse_ignored(args, "it goes with --json", "--logprobs")
    sampling_of(args)
    messages = None
    if args.messages is not None:
        messages = checked(read_json(args.messages))
    examples = _examples(args, messages)
    with open_session(args) as session:
        sampling = sampling_of(args, session.bundle)
        template = dict(args.template_arg)
        mode = session.mode(speculate=not args.no_speculate)
        for number, example in enumerate(examples, 1):
            prompt = example.prompt if messages is None else None
            try:
                ids = session.prompt_ids(
                    prompt, messages=messages, system=example.system, template=template
                )
                runs = session.runs(
                    ids, max_tokens=args.max_tokens, stop=args.stop, mode=mode, sampling=sampling
                )
                _answer(args, session, example.prompt, runs)
            except InputError as error:
                if args.data is None:
                    raise
                raise type(error)(f"{args.data}, prompt {number}: {error}") from error
    return 0


def _answer(args: argparse.Namespace, session: Session, shown: str, runs: Iterator[Run]) -> None:
    if args.trace:
        print(f"> {shown}")
        trace = Trace(session.tokenizer, session.engine.geometry.tree)
    for step in runs:
        if args.trace:
            trace.show(step)
        elif step.text and not args.json:
            print(step.text, end="", flush=True)
    if args.json:
        print(json.dumps(as_json(shown, session.last), ensure_ascii=False), flush=True)
        return
    if not args.trace:
        print()
    if not args.quiet:
        print(summary(session.last), file=sys.stderr)


def as_json(prompt: str, answer: Generation) -> dict[str, Any]:
    """The ``--json`` form of an answer.

    ``seconds``: prefill and decoding; ``accepted``: tokens of each step.
    """
    found = {
        "prompt": prompt,
        "text": answer.text,
        "tokens": answer.tokens,
        "steps": answer.steps,
        "accepted": answer.accepted,
        "seconds": round(answer.seconds, 6),
        "ttft_seconds": round(answer.prefill_seconds, 6),
        "prompt_tokens": answer.prompt_tokens,
        "reason": answer.reason,
    }
    if answer.inexact:
        found["inexact"] = True
    if answer.alone:
        found["alone"] = answer.alone
    if answer.logprobs:
        found["logprobs"] = [asdict(each) for each in answer.logprobs]
    return found


def summary(answer: Generation) -> str:
    """The statistics of an answer in one line."""
    parts = [
        count(len(answer.tokens), "token"),
        f"first after {answer.prefill_seconds * 1e3:.0f} ms",
    ]
    if answer.steps:
        parts += [count(answer.steps, "step"), f"{answer.tokens_per_step:.2f} tokens per step"]
        parts += [f"{answer.tokens_per_second:.1f} tokens/s"]
    if answer.alone:
        parts.append(f"{count(answer.alone, 'token')} without the server")
    end = f"; {answer.reason}"
    if answer.inexact:
        end += "; inexact: typical acceptance"
    return f"[{', '.join(parts)}{end}]"


def _examples(
    args: argparse.Namespace, messages: Sequence[Mapping[str, Any]] | None
) -> list[Example]:
    """The prompts; of a conversation, its last message."""
    if messages is not None:
        return [Example(messages[-1]["content"], system=args.system)]
    if args.data is not None:
        return read_examples(args.data, args.limit, require_completion=False)
    prompt = _stdin() if args.prompt == STDIN else args.prompt
    return [Example(prompt, system=args.system)]


def _stdin() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed")
    # The last line break comes from the shell or editor; it is not part of the prompt.
    return utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n").removesuffix("\r")


ACCEPTED = "green"
REJECTED = "red"
ISSUED = "bold"
MARGIN = "dim"
ALTERNATIVES = "|"


class Trace:
    """Prints the steps of an answer, one line each (after figure 11 of 2402.11131).

    Accepted drafts are green, the model's own tokens bold, rejected drafts red, or in brackets
    without colours.
    """

    def __init__(self, tokenizer: ChatTokenizer, tree: Tree) -> None:
        self._tokenizer = tokenizer
        self._tree = tree
        self._console = Console(soft_wrap=True, highlight=False)
        self._steps = 0

    def show(self, run: Run) -> None:
        """Print one run, unless it has no tokens."""
        if run.tokens:
            self._console.print(self.line(run))
            self._steps += 1

    def line(self, run: Run) -> Text:
        """The line of the next step: its number, how many tokens it emitted, and the tokens."""
        margin = "prefill   "
        if self._steps:
            margin = f"{self._steps:>4}  +{len(run.tokens):<2} "
        line = Text(margin, style=MARGIN)
        drafts = run.drafts.tolist() if run.drafts is not None else []
        tree = self._tree.levels(len(drafts))  # a short step has fewer
        path = accepted_path(tree, drafts, run.tokens)
        for i, token in enumerate(run.tokens):
            line.append(self._text(token), style=ACCEPTED if i < len(path) else ISSUED)
        beyond = [
            node for node in tree.paths if len(node) > len(path) and node[: len(path)] == path
        ]
        for depth in sorted({len(node) for node in beyond}):
            rejected = dict.fromkeys(
                drafts[depth - 1][node[-1]] for node in beyond if len(node) == depth
            )
            text = ALTERNATIVES.join(map(self._text, rejected))
            if self._console.color_system is None:
                text = f"[{text}]"
            line.append(" ")
            line.append(text, style=REJECTED)
        return line

    def _text(self, token: int) -> str:
        written = str(self._tokenizer.tokenizer.id_to_token(token))
        text = str(self._tokenizer.tokenizer.decode([token], skip_special_tokens=False))
        # Decoders drop the space before a first word; the vocabulary still shows it.
        if written[:1] in ("\u0120", "\u2581") and not text.startswith(" "):
            text = f" {text}"
        return (text or written).replace("\n", "\u21b5").replace("\t", "\u21e5")
