"""Continuous batching over one cache, for self-distillation and for dev rows.

A slot whose answer has ended takes the next prompt. Prompts come in order of length; those that
start together are padded on the right, and rows beyond a slot's length are masked.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain
from math import ceil

import torch
from torch import Tensor

from ssdevice.model.attention import KeyValue
from ssdevice.model.backbone import Backbone
from ssdevice.model.visibility import causal

Choose = Callable[[Tensor, list[int], list[int]], list[int]]
"""``(logits [n, V], requests [n], places [n])`` -> the token chosen for each row.

A row is the next token of an answer: its request's number and its place there.
"""
SLOTS = 64
"""Answers in progress at once."""
MOST_SLOTS = 1024
"""The same with CUDA, if its memory has room: a step takes as long for so many as for SLOTS."""
PREFILL_TOKENS = 2048
"""Padded tokens per prefill: this bounds the memory of the attention scores."""
REFILL = 4
"""New prompts start when one in so many slots is free.

A prefill of few rows costs almost as much as one of many.
"""
VISIBLE_MULTIPLE = 32
"""Steps see a multiple of so many rows, so that few shapes occur."""


def greedy(logits: Tensor, requests: list[int], places: list[int]) -> list[int]:
    """The likeliest token of each row of ``logits [n, V]``; the lowest id wins a tie.

    It is the same for every request and place.
    """
    return logits.argmax(-1).tolist()


def sampling(seed: int, temperature: float, top_p: float, most: int = 1024) -> Choose:
    """Sampling from the likeliest tokens that together have ``top_p`` of the probability.

    ``most``: how many tokens at most. A token depends on the seed, the request's number and the
    place, not on the rest of the batch.
    """

    def choose(logits: Tensor, requests: list[int], places: list[int]) -> list[int]:
        probabilities = torch.softmax(logits.float() / temperature, -1)
        best, ids = probabilities.topk(min(most, logits.shape[-1]))
        before = best.cumsum(-1) - best
        kept = torch.where(before < top_p, best, 0.0).cumsum(-1)
        pairs = zip(requests, places, strict=True)
        draws = [random.Random(f"{seed}/{request}/{place}").random() for request, place in pairs]
        wanted = torch.tensor(draws, device=logits.device)[:, None] * kept[:, -1:]
        at = torch.searchsorted(kept, wanted, right=True).clamp(max=kept.shape[-1] - 1)
        return ids.gather(1, at)[:, 0].tolist()

    return choose


class Decoding:
    """Iterates over ``(i, answer to prompts[i])`` as answers end.

    An answer ends with a token of ``stop``, or after ``most[i]`` tokens. ``slots``: answers in
    progress at once (default: what suits the device), in rows 0 to n - 1 of the cache. ``names``:
    the request numbers that ``choose`` gets (default: the prompts' indices).
    """

    def __init__(
        self,
        backbone: Backbone,
        prompts: Sequence[Sequence[int]],
        stop: Set[int],
        most: Sequence[int],
        choose: Choose = greedy,
        slots: int | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        self.backbone = backbone
        self.prompts = prompts
        self.stop = stop
        self.most = most
        self.choose = choose
        self.names = names or range(len(prompts))
        self.waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
        self.device = next(backbone.parameters()).device
        self.requests: list[int] = []  # by slot
        self.answers: list[list[int]] = []  # by slot
        self.cache: list[KeyValue] = []  # by layer
        totals = (len(ids) + tokens for ids, tokens in zip(prompts, most, strict=True))
        self.rows = _whole_blocks(max(totals, default=0))
        if slots is None:
            slots = self._most_slots()
        self.slots = min(slots, len(prompts))

    def _most_slots(self) -> int:
        """How many answers may be in progress at once.

        On a CUDA device, as many as fit into half of its free memory, with their rows and logits in
        float32.
        """
        if self.device.type != "cuda":
            return SLOTS
        backbone = self.backbone
        numbers = 2 * backbone.num_layers * backbone.kv_heads * backbone.head_dim * self.rows
        numbers += 4 * int(backbone.config.vocab_size)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, min(MOST_SLOTS, free // 2 // (4 * numbers)))

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        while self.waiting or self.requests:
            free = self.slots - len(self.requests)
            if self.waiting and free * REFILL >= self.slots:
                self._start(free)
            else:
                self._step()
            for slot in reversed(range(len(self.requests))):
                request = self.requests[slot]
                answer = self.answers[slot]
                if answer[-1] in self.stop or len(answer) >= self.most[request]:
                    self._drop(slot)
                    yield request, answer

    def _start(self, free: int) -> None:
        """Read the next prompts into free slots; each gets the first token of its answer."""
        backbone = self.backbone
        first = len(self.requests)
        group: list[int] = []
        while self.waiting and len(group) < free:
            width = len(self.prompts[self.waiting[0]])
            if group and width * (len(group) + 1) > PREFILL_TOKENS:
                break
            group.append(self.waiting.popleft())
        prompts = [self.prompts[i] for i in group]
        lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
        width = len(prompts[-1])  # the longest
        padded = [list(ids) + [0] * (width - len(ids)) for ids in prompts]
        tokens = torch.tensor(padded, device=self.device)
        positions = torch.arange(width, dtype=torch.int32, device=self.device)
        masks = backbone.masks(lambda window: causal(positions, window)[None, None])
        h = backbone.embed(tokens, positions[None].expand(len(group), -1))
        h, new = backbone.run(0, backbone.num_layers, h, backbone.rope(positions[None]), masks)
        if not self.cache:
            self.cache = [(self._room(keys), self._room(values)) for keys, values in new]
        for whole, part in zip(chain(*self.cache), chain(*new), strict=True):
            whole[first : first + len(group), :, :width] = part
        last = h[torch.arange(len(group), device=self.device), lengths - 1]
        self.requests += group
        self.answers += [[] for _ in group]
        self._take(last, first)

    def _step(self) -> None:
        """One more token for every slot."""
        backbone = self.backbone
        n = len(self.requests)
        # The last token of an answer has no row yet, so its position is the number of rows.
        lengths = [
            len(self.prompts[request]) + len(answer) - 1
            for request, answer in zip(self.requests, self.answers, strict=True)
        ]
        visible = min(self.rows, _whole_blocks(max(lengths)))
        at = torch.tensor(lengths, dtype=torch.int32, device=self.device)[:, None]
        columns = torch.arange(visible, dtype=torch.int32, device=self.device)[None]

        def sees(window: int | None) -> Tensor:
            seen = columns < at
            if window is not None:
                seen = seen & (at - columns < window)
            itself = torch.ones_like(seen[:, :1])
            return torch.cat([seen, itself], dim=1)[:, None, None]

        past = [[(keys[:n, :, :visible], values[:n, :, :visible])] for keys, values in self.cache]
        tokens = torch.tensor([[answer[-1]] for answer in self.answers], device=self.device)
        h = backbone.embed(tokens, at)
        masks = backbone.masks(sees)
        h, new = backbone.run(0, backbone.num_layers, h, backbone.rope(at), masks, past)
        slots = torch.arange(n, device=self.device)
        for whole, part in zip(chain(*self.cache), chain(*new), strict=True):
            whole[slots, :, at[:, 0].long()] = part[:, :, 0].to(whole.dtype)
        self._take(h[:, 0], 0)

    def _take(self, h: Tensor, first: int) -> None:
        """Choose the next tokens of the slots from ``first`` on by their last rows ``h [n, D]``."""
        answers = self.answers[first:]
        requests = [self.names[request] for request in self.requests[first:]]
        places = [len(answer) for answer in answers]
        tokens = self.choose(self.backbone.head(h), requests, places)
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)

    def _drop(self, slot: int) -> None:
        """Free a slot by moving the last one there, so that slots in use stay contiguous."""
        last = len(self.requests) - 1
        if slot != last:
            held = len(self.prompts[self.requests[last]]) + len(self.answers[last])
            for whole in chain(*self.cache):
                whole[slot, :, :held] = whole[last, :, :held]
            self.requests[slot] = self.requests[last]
            self.answers[slot] = self.answers[last]
        del self.requests[last], self.answers[last]

    def _room(self, like: Tensor) -> Tensor:
        """An empty cache for rows ``like [.., kv_heads, R, head_dim]`` of every slot.

        It is of zeros, because a NaN in a masked row would spoil the sum, and in the type in which
        products read it.
        """
        kind = like.device.type
        dtype = like.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        shape = (self.slots, like.shape[1], self.rows, like.shape[3])
        return like.new_zeros(shape, dtype=dtype)


def _whole_blocks(rows: int) -> int:
    """The next multiple of VISIBLE_MULTIPLE."""
    return ceil(rows / VISIBLE_MULTIPLE) * VISIBLE_MULTIPLE
