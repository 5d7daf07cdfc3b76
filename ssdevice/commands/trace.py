"""A trace of the steps: accepted drafts in green, the model's own tokens in bold, rejected drafts in red.

Without colours, as in a file, rejected drafts are in brackets.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ssdevice.runtime.generation import Run, accepted_path
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree

ACCEPTED, REJECTED, ISSUED, MARGIN = "green", "red", "bold", "dim"
ALTERNATIVES = "|"


class Trace:
    """Prints the steps of an answer, one line each (after figure 11 of 2402.11131)."""

    def __init__(self, tokenizer: ChatTokenizer, tree: Tree) -> None:
        self._tokenizer, self._tree = tokenizer, tree
        self._console = Console(soft_wrap=True, highlight=False)
        self._steps = 0

    def show(self, run: Run) -> None:
        """Print one run, unless it has no tokens."""
        if run.tokens:
            self._console.print(self.line(run))
            self._steps += 1

    def line(self, run: Run) -> Text:
        """The line of the next step: its number, how many tokens it emitted, and the tokens."""
        if self._steps == 0:
            line = Text("prefill   ", style=MARGIN)
        else:
            line = Text(f"{self._steps:>4}  +{len(run.tokens):<2} ", style=MARGIN)
        path = () if run.drafts is None else accepted_path(self._tree, run.drafts.tolist(), run.tokens)
        for i, token in enumerate(run.tokens):
            line.append(self._text(token), style=ACCEPTED if i < len(path) else ISSUED)
        if run.drafts is not None:
            colored = self._console.color_system is not None
            for candidates in self._rejected(run.drafts.tolist(), path):
                text = ALTERNATIVES.join(self._text(token) for token in candidates)
                line.append(" ")
                line.append(text if colored else f"[{text}]", style=REJECTED)
        return line

    def _rejected(self, drafts: list[list[int]], path: tuple[int, ...]) -> list[list[int]]:
        """The tree's candidates beyond the accepted path, by depth."""
        beyond: dict[int, list[int]] = {}
        for node in self._tree.paths:
            if len(node) > len(path) and node[: len(path)] == path:
                token = drafts[len(node) - 1][node[-1]]
                if token not in beyond.setdefault(len(node), []):
                    beyond[len(node)].append(token)
        return [beyond[depth] for depth in sorted(beyond)]

    def _text(self, token: int) -> str:
        """The text of a single token, with its leading space and visible line breaks."""
        written = str(self._tokenizer.tokenizer.id_to_token(token))
        text = str(self._tokenizer.tokenizer.decode([token], skip_special_tokens=False))
        # Decoders drop the space before a first word; the vocabulary still shows it.
        if written[:1] in ("\u0120", "\u2581") and not text.startswith(" "):
            text = f" {text}"
        return (text or written).replace("\n", "\u21b5").replace("\t", "\u21e5")
