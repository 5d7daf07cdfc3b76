"""The server's side of ``ssdevice.runtime.split``: a conversation for each device.

It continues where the device's drafts agree with the model.
"""

from collections import OrderedDict

from ssdevice.contract import STEP
from ssdevice.errors import InputError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.loop import check_prompt, prefill
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import UNKNOWN_TEXT, Limits, packed_answer, unpacked
from ssdevice.serve.guard import Refusal


class Verifying:
    """The conversations of at most ``most`` devices.

    A further one takes the place of the one that was idle longest. Raises InputError for a bundle
    without a step.
    """

    def __init__(self, session: Session, most: int) -> None:
        if STEP not in session.engine.functions:
            raise InputError(
                f"--verify: {session.bundle.folder} has no {STEP} that verifies drafts; "
                "see export --tree"
            )
        self.session = session
        self.most = most
        self.limits = Limits.of(session.bundle)
        self._held: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def answer(self, app: str, client: str, at: int, content: bytes) -> bytes:
        """The tokens of one call: after a text whose first ``at`` tokens are held, or after one
        token with drafts.

        Raises Refusal with UNKNOWN_TEXT if fewer are held, InputError for drafts that are too many
        or misplaced, and ids that are no tokens. A refused request changes nothing.
        """
        if len(client) != 32 or not set(client) <= set("0123456789abcdef"):
            raise InputError(
                f"client {client[:60]!r}, expected 32 digits of a random number, in hexadecimal"
            )
        text, drafts = unpacked(content)
        engine = self.session.engine_of(app)
        conversation = self._held.get((app, client))
        step = at > 0 and len(text) == 1
        most = self.limits.drafts if step else 0
        if len(drafts) > most:
            raise InputError(
                f"{len(drafts)} drafts after {len(text)} tokens at {at}, expected at most "
                f"{self.limits.drafts}, after one token that follows a text"
            )
        check_prompt(engine.geometry, text, at)
        if drafts and max(drafts) >= engine.geometry.vocab:
            raise InputError(
                f"draft {max(drafts)} is not one of the model's {engine.geometry.vocab} tokens"
            )
        held = 0 if conversation is None else conversation.length
        if at > held:
            raise Refusal(
                f"{held} tokens of this client are held, not {at}",
                UNKNOWN_TEXT,
                code="unknown_text",
            )
        if conversation is None:
            if len(self._held) >= self.most:
                self._held.popitem(last=False)
            conversation = self._held[app, client] = engine.new_conversation()
        self._held.move_to_end((app, client))
        conversation.length = at
        if not step:
            return packed_answer([prefill(conversation, text)])
        for depth, token in enumerate(drafts):
            conversation.propose(depth, token)
        # The drafts below those that were sent are those of streams here.
        tokens = conversation.step(text[0])[: min(len(drafts) + 1, engine.geometry.context - at)]
        conversation.length += len(tokens)
        return packed_answer(tokens)
