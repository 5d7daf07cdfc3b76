"""What a model writes itself, to calibrate with where no data is given.

Linears are rounded for the inputs that they will read, and an app's text is mostly its model's own.
About a thousand tokens are enough; a user's turn is sampled from the chat template's opening, and
its answer after it.
"""

from collections.abc import Callable, Sequence

from ssdevice.errors import ConfigError
from ssdevice.model.backbone import Backbone
from ssdevice.model.decoding import Decoding, sampling
from ssdevice.text.tokenizer import ChatTokenizer, Sample

ROWS = 16
"""Conversations that are written, all at once."""
TURN = 48
ANSWER = 96
"""Tokens of a user's turn and of an answer, at most."""
TEMPERATURE = 0.8
TOP_P = 0.95
SEED = 0
OPENINGS = ("The", "In", "We", "It", "def", "This", "You", "When")
"""How a text begins where the template has no opening for a user's turn."""

Heard = Callable[[int, int], None]
"""Hears how many rows of how many are written."""


def written(
    backbone: Backbone, tokenizer: ChatTokenizer, instruction: str, context: int, heard: Heard
) -> list[Sample]:
    """ROWS conversations of the model with itself, cut at ``context`` tokens.

    They depend on the weights and the template only. A base without a chat template goes on from
    OPENINGS.
    """
    stop = set(tokenizer.stop_ids)
    try:
        opening, end = tokenizer.user_opening(instruction)
    except ConfigError:
        prompts = [tokenizer.encode(OPENINGS[i % len(OPENINGS)], special=True) for i in range(ROWS)]
    else:
        turns = _continued(backbone, [opening] * ROWS, stop | {end}, min(TURN, context), heard, 0)
        prompts = []
        for turn in turns:
            if turn[-1] == end:
                turn = turn[:-1]
            text = tokenizer.decode(turn)
            prompts.append(tokenizer.prompt_ids(text or "?", instruction=instruction))
    prompts = [prompt[: context - 1] for prompt in prompts]
    answers = _continued(backbone, prompts, stop, ANSWER, heard, ROWS)
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(Sample((*prompt, *answer)[:context], len(prompt)))
    return rows


def _continued(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    stop: set[int],
    most: int,
    heard: Heard,
    before: int,
) -> list[list[int]]:
    """What the model goes on with after each prompt, up to a stop token or ``most`` tokens."""
    choose = sampling(SEED, TEMPERATURE, TOP_P)
    decoding = Decoding(backbone, prompts, stop, [most] * len(prompts), choose)
    found: dict[int, list[int]] = {}
    for number, answer in decoding:
        found[number] = answer
        heard(before + len(found), 2 * ROWS)
    return [found[number] for number in range(len(prompts))]
