"""Drafting here and verifying on a server: a small model on the device, a large one behind
``ssdevice serve --verify``.

``SplitEngine`` wraps the engine of the small model. It emits the large model's greedy tokens while
the server answers, and the small model's own while it does not::

    Session.open("small.bundle", opener=VerifyAt("http://127.0.0.1:8000/v1", key).open_engine)

A request has four bytes for each token, three of its id and one of its place, and an answer three
bytes (2410.03804, table 7: 4M and 3A for a small model that needs no states of the large one; M:
the root and its drafts, A: the tokens that the call emits).
"""

import json
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from ssdevice import arguments, contract
from ssdevice.bundle.folder import Bundle
from ssdevice.config import load_strict
from ssdevice.errors import InputError
from ssdevice.rules import Ruled, within
from ssdevice.runtime.engine import Cache, Engine, EngineOptions, Inputs, Outputs, open_engine
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.loop import plain, plain_step, prefill
from ssdevice.text.tokenizer import TOKENIZER_ROLE
from ssdevice.tree import Tree

BINARY = "application/octet-stream"
VERIFIES = "verifies"
HEALTH = "/health"
OK = 200
UNKNOWN_TEXT = 409
"""The status of a request whose text, up to its position, the server does not hold."""
PASSING = (408, 429)
"""Statuses of refusals that do not last."""
DRAFTED = 3
PATIENCE_S = 2.0
TOKEN_S = 0.05
"""How long a server may take for an answer, and for each token of text more."""
AGAIN_S = 0.5
"""How often a device that goes on alone asks whether the server is back."""
MAX_ANSWER = 1 << 16
MAX_CHUNK = 1 << 16


def packed(text: Sequence[int], drafts: Sequence[int]) -> bytes:
    """Tokens of the text, and drafts after the last of them with their places 1, 2, .."""
    placed = [token | (place << 24) for place, token in enumerate(drafts, 1)]
    return np.array([*text, *placed], "<u4").tobytes()


def unpacked(content: bytes) -> tuple[list[int], list[int]]:
    """What ``packed`` was given. Raises InputError for anything else."""
    if not content or len(content) % 4:
        raise InputError(
            f"{len(content)} bytes, expected four for each token, and at least one token"
        )
    words = np.frombuffer(content, "<u4")
    places = words >> 24
    ids = (words & 0xFFFFFF).tolist()
    drafts = int(np.count_nonzero(places))
    end = len(ids) - drafts
    if end == 0 or places[end:].tolist() != list(range(1, drafts + 1)):
        raise InputError("the places of tokens are 0 for text, and after it 1, 2, .. for drafts")
    return ids[:end], ids[end:]


def packed_answer(tokens: Sequence[int]) -> bytes:
    """Three bytes for each token."""
    return b"".join(token.to_bytes(3, "little") for token in tokens)


def on_stderr(text: str) -> None:
    """Print a line at once."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class VerifyAt:
    """A server that verifies: its ``url``, as it prints it, and the ``key`` that it wants.

    ``drafts``: tokens that this device drafts for a call, fewer where the server takes fewer.
    ``patience``: seconds until it is given up.
    ``tell``: is told when the device goes on alone, and when the server is back.
    """

    url: str
    key: str | None = None
    drafts: int = DRAFTED
    patience: float = PATIENCE_S
    tell: Callable[[str], object] = on_stderr

    def __post_init__(self) -> None:
        arguments.whole("drafts", self.drafts, 1, 32)
        if not _is_address(self.url):
            raise InputError(
                f"{self.url}: expected the address of a server, such as http://127.0.0.1:8000/v1"
            )

    def open_engine(self, bundle: Bundle, app: str | None, options: EngineOptions) -> "SplitEngine":
        """The engine of a bundle's app, verified at this server under the app's name.

        Raises InputError for a server that does not verify, or has another tokenizer.
        """
        device = open_engine(bundle, app, options)
        try:
            name = bundle.app(app).name
            return SplitEngine(device, Link(self, name, Limits.of(bundle).tokenizer))
        except BaseException:
            device.close()
            raise


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:  # no number, or none of a port
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port != 0
        and not parts.query
        and parts.username is None
    )


@dataclass(frozen=True)
class Limits(Ruled):
    """What ``/v1/models/NAME`` tells of a server that verifies.

    ``drafts``: verified in a call at most.
    ``context``: tokens of a conversation.
    ``tokenizer``: its sha256.
    """

    drafts: int = field(metadata=within(1, 32))
    context: int = field(metadata=within(1, contract.MAX_CONTEXT))
    tokenizer: str

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """What a bundle verifies."""
        tokenizer = bundle.manifest.files[bundle.manifest.roles[TOKENIZER_ROLE]].sha256
        return cls(bundle.geometry.tree.depth, bundle.geometry.context, tokenizer)


class Away(Exception):
    """The server does not answer, or something else does in its place."""


class Link:
    """Verification by a server, for one app, over a connection that stays open.

    While the server does not answer, a thread asks for its health. Raises InputError where the
    server refuses, for then asking again does not help. ``tokenizer``: the sha256 of this device's.
    """

    def __init__(self, at: VerifyAt, app: str, tokenizer: str) -> None:
        self.at = at
        self.app = app
        self.tokenizer = tokenizer
        parts = urlsplit(at.url)
        kind = {"http": HTTPConnection, "https": HTTPSConnection}
        self._base = parts.path.rstrip("/")
        self._connect = partial(
            kind[parts.scheme], str(parts.hostname), parts.port, timeout=at.patience
        )
        # None before the server has answered, and while it is away.
        self._limits: Limits | None = None
        self._connection: HTTPConnection | None = None
        self.back = threading.Event()
        self._closed = threading.Event()
        self.back.set()
        self._left = False

    def close(self) -> None:
        """Leave the server."""
        self._closed.set()
        self._hang_up()

    def limits(self) -> Limits | None:
        """The server's limits; None while it is away."""
        if self._limits is None and self.back.is_set():
            try:
                self._limits = self._meet()
            except Away as error:
                self._leave(error)
        return self._limits

    def verify(
        self, client: str, text: list[int], held: int, drafts: Sequence[int]
    ) -> list[int] | None:
        """The server's tokens after ``text``, of which it holds ``held`` tokens; None while it is
        away.

        ``drafts`` are verified where it lacks only the last token.
        """
        limits = self.limits()
        if limits is None:
            return None
        try:
            for at in (held, 0):
                guesses = drafts[: limits.drafts] if 0 < at == len(text) - 1 else ()
                sent = packed(text[at:], guesses)
                patience = self.at.patience + TOKEN_S * (len(text) - at)
                status, answer = self._ask(
                    "POST", f"/verify/{self.app}/{client}/{at}", sent, patience
                )
                if status != UNKNOWN_TEXT:
                    break
            tokens = [int.from_bytes(answer[i : i + 3], "little") for i in range(0, len(answer), 3)]
            if status != OK or len(answer) % 3 or not 1 <= len(tokens) <= len(guesses) + 1:
                raise Away(f"status {status} and {len(answer)} bytes are no answer")
        except Away as error:
            self._leave(error)
            return None
        if self._left:
            self._left = False
            self.at.tell(f"ssdevice: the server is back; it verifies from token {len(text)} on")
        return tokens

    def _meet(self) -> Limits:
        _, content = self._ask("GET", f"/models/{self.app}", b"", self.at.patience)
        try:
            model = json.loads(content)[VERIFIES]
        except KeyError:
            raise InputError(
                f"{self.at.url} verifies no drafts; start it with ssdevice serve --verify"
            ) from None
        except (ValueError, TypeError):
            raise Away("an answer that is not JSON") from None
        limits = load_strict(Limits, model, self.at.url)
        if limits.tokenizer != self.tokenizer:
            raise InputError(
                f"{self.at.url}: its app {self.app} has another tokenizer than this bundle"
            )
        return limits

    def _ask(self, method: str, path: str, content: bytes, patience: float) -> tuple[int, bytes]:
        """Status and content of a response.

        Raises Away, and InputError for a refusal that lasts.
        """
        while True:
            fresh = self._connection is None
            try:
                status, answer = self._exchange(method, path, content, patience)
                break
            except (OSError, HTTPException) as error:
                self._hang_up()
                if fresh or isinstance(error, TimeoutError):
                    raise Away(str(error) or type(error).__name__) from None
        if status in (OK, UNKNOWN_TEXT):
            return status, answer
        try:
            reason = str(json.loads(answer)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            raise Away(f"status {status}") from None
        if status in PASSING or status >= 500:
            raise Away(reason)
        raise InputError(f"{self.at.url}: {reason}")

    def _exchange(
        self, method: str, path: str, content: bytes, patience: float
    ) -> tuple[int, bytes]:
        connection = self._connection = self._connection or self._connect()
        connection.putrequest(method, self._base + path, skip_accept_encoding=True)
        if self.at.key is not None:
            connection.putheader("Authorization", f"Bearer {self.at.key}")
        if content:
            connection.putheader("Content-Type", BINARY)
            connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content or None)
        assert connection.sock is not None
        connection.sock.settimeout(patience)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER)
        if response.read(1):
            raise HTTPException("an answer that is too long")
        return response.status, answer

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _leave(self, error: Away) -> None:
        """Go on alone, and wait for the server in a thread."""
        self._hang_up()
        self._limits = None
        self.back.clear()
        if not self._left:
            self._left = True
            self.at.tell(
                f"ssdevice: the server does not answer ({error}); this device goes on alone"
            )
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while not self._closed.wait(AGAIN_S):
            with closing(self._connect()) as connection, suppress(OSError, HTTPException):
                connection.request("GET", HEALTH)
                if connection.getresponse().status == OK:
                    self.back.set()
                    return


class SplitEngine(Engine):
    """A bundle's engine that drafts for a server; see the module. Its sessions decode greedily."""

    def __init__(self, device: Engine, link: Link) -> None:
        ours = device.geometry
        at = link.at
        limits = link.limits() or Limits(at.drafts, ours.context, link.tokenizer)
        context = min(ours.context, limits.context)
        drafts = min(at.drafts, limits.drafts)
        geometry = replace(
            ours,
            gamma=drafts,
            k=1,
            tree=Tree.chain(drafts),
            context=context,
            chunk=min(context, MAX_CHUNK),
            hidden=0,
            short=0,
        )
        super().__init__(geometry, frozenset({contract.PREFILL, contract.STEP}), device.source)
        self.device = device
        self.link = link

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> "SplitCache":
        return SplitCache(inputs, self)

    def release(self) -> None:
        self.link.close()
        self.device.close()

    def warm(self) -> None:
        self.device.warm()


class SplitCache(Cache):
    """A conversation of the device, and that of the server under the name ``client``.

    Both have the text so far.
    """

    def __init__(self, inputs: Inputs, engine: SplitEngine) -> None:
        super().__init__(inputs)
        self.geometry = engine.geometry
        self.link = engine.link
        self.mine = engine.device.new_conversation()
        self.client = secrets.token_hex(16)
        self.advance = plain if contract.PLAIN in engine.device.functions else plain_step
        self.answer = Generation(0)
        self.text = list[int]()
        self.held = 0  # how many tokens of the text the server holds

    def begin(self, answer: Generation) -> None:
        self.answer = answer

    def call(self, function: str, length: int) -> Outputs:
        drafts = self.inputs[contract.DRAFTS]
        guesses: Sequence[int] = ()
        if function == contract.STEP:
            self.text[length:] = self.inputs[contract.ROOT].tolist()
            guesses = drafts[: self.geometry.context - len(self.text), 0].tolist()
        else:
            given = self.inputs[contract.VALID].item()
            self.text[length:] = self.inputs[contract.CHUNK][:given].tolist()
        self.held = min(self.held, length)
        tokens = self.link.verify(self.client, self.text, self.held, guesses)
        after = np.zeros_like(drafts)
        if tokens is None:
            self.answer.alone += 1
            tokens = self._following(self.text, 1)
        else:
            self.text += tokens[:-1]
            self.held = len(self.text)
            room = min(len(after), self.geometry.context - self.held)
            own = self._following([*self.text, tokens[-1]], room)
            after[: len(own), 0] = own
        self.native_seconds = self.mine.cache.native_seconds
        found = np.array(tokens, np.int32)
        return {
            contract.NEXT_ROOT: found,
            contract.TOKENS: found,
            contract.COUNT: np.array([len(tokens)]),
            contract.NEXT_DRAFTS: after,
        }

    def rows(self, start: int, end: int) -> NDArray[Any] | None:
        raise InputError("a conversation that a server verifies cannot be saved")

    def _following(self, text: list[int], count: int) -> list[int]:
        """The device's own next tokens after a text."""
        mine = self.mine
        found = list[int]()
        mine.length = mine.shared(text)
        pending = text[mine.length :]
        while len(found) < count:
            if len(pending) > self.geometry.tree.emitted:
                pending = [prefill(mine, pending)]
            else:
                for token in pending:
                    (after,) = self.advance(mine, token)
                    mine.length += 1
                pending = [after]
            found += pending
        return found
