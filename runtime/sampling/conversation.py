"""Decoding where the host chooses tokens: the same loop, adaptive mode and lookup over a conversation of two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import VERIFY, VERIFY_PLAIN
from ssdevice.errors import InputError
from ssdevice.runtime.sampling.choice import Chooser, walk

if TYPE_CHECKING:
    from ssdevice.runtime.conversation import Conversation


class ChoosingConversation:
    """A ``Conversation`` whose tokens a ``Chooser`` chooses, for the length of one answer.

    ``step`` verifies, walks and drafts again; ``step_plain`` chooses from one row. Both emit the same tokens, because a
    choice does not depend on drafts.
    """

    host_chooses = True

    def __init__(self, conversation: Conversation, chooser: Chooser) -> None:
        has = conversation.engine.functions
        if not {VERIFY, VERIFY_PLAIN} & has:
            raise InputError(
                f"{conversation.engine.source}: this bundle chooses tokens in its graph, greedily; "
                "for sampling and the like export it with --choose host"
            )
        self.conversation, self.chooser = conversation, chooser
        self.geometry = conversation.geometry
        self.prefill = conversation.prefill

    @property
    def length(self) -> int:
        return self.conversation.length

    @length.setter
    def length(self, value: int) -> None:
        self.conversation.length = value

    @property
    def drafts(self) -> NDArray[np.int32]:
        return self.conversation.drafts

    @property
    def text(self) -> list[int]:
        return self.conversation.text

    def step(self, last: int) -> list[int]:
        """See ``Conversation.step``."""
        logits = self.conversation.verify(last)
        path, tokens = walk(self.geometry.tree, self.conversation.verified, lambda node: self.chooser(logits[node]))
        self.conversation.keep(path, tokens)
        return tokens

    def step_plain(self, last: int) -> int:
        """See ``Conversation.step_plain``."""
        token = self.chooser(self.conversation.verify_plain(last)[0])
        self.conversation.keep([0], [token])
        return token
