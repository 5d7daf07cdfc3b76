"""Continuous batches write what transformers writes by prompt, whatever shares the batch."""

from __future__ import annotations

import pytest
import torch

from ssdevice.model.decoding import MOST_SLOTS, SLOTS, Decoding, sampling
from ssdevice.model.loading import build
from tests.model.tiny import VOCAB, tiny_model

STOP = {3, 7}
MOST = 20


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.wide) for name in ("mistral", "gemma2"))],
)
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    given = prompts(23)
    hf = tiny_model(family).eval()
    expected = []
    for prompt in given:
        out = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=MOST,
            do_sample=False,
            eos_token_id=list(STOP),
            pad_token_id=0,
        )
        expected.append(out[0, len(prompt) :].tolist())
    backbone = build(hf, None, 64).backbone
    for slots in (1, 4, 64):
        found = dict(Decoding(backbone, given, STOP, [MOST] * len(given), slots=slots))
        assert [found[i] for i in range(len(given))] == expected, f"{slots} slots"
    assert len({len(answer) for answer in expected}) > 3, (
        "answers that end at different lengths were compared"
    )


def test_cuda_has_as_many_slots_as_half_of_its_free_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No machine of the tests has CUDA: the count alone is tested, which only asks the device for
    its memory.
    """
    backbone = build(tiny_model("llama").eval(), None, 64).backbone
    batch = Decoding(backbone, [[1, 2]] * 2000, STOP, [MOST] * 2000)
    assert batch.slots == SLOTS
    batch.device = torch.device("cuda")
    row = 2 * backbone.num_layers * backbone.kv_heads * backbone.head_dim
    slot = 4 * (row * batch.rows + 4 * VOCAB)
    for free, expected in ((2 * 100 * slot + 1, 100), (1 << 40, MOST_SLOTS), (0, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        assert batch._most_slots() == expected


def test_a_sampled_answer_depends_on_its_name_only() -> None:
    backbone = build(tiny_model("llama").eval(), None, 64).backbone
    choose = sampling(seed=1, temperature=1.0, top_p=0.9)
    many = dict(Decoding(backbone, [[1, 2]] * 12, STOP, [MOST] * 12, choose, slots=5))
    few = dict(Decoding(backbone, [[1, 2]] * 2, STOP, [MOST] * 2, choose, names=[3, 8]))
    assert (few[0], few[1]) == (many[3], many[8])
    assert len({tuple(answer) for answer in many.values()}) > 6


def test_sampling_keeps_to_the_likeliest_tokens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(400, 1)
    chosen = sampling(0, 1.0, 0.79)(logits, list(range(400)), [0] * 400)
    counts = [chosen.count(token) for token in range(4)]
    assert counts[2:] == [0, 0] and 215 < counts[0] < 285, "0.5 of 0.8 is 250 of 400"
    assert set(sampling(0, 1.0, 1.0)(logits, list(range(400)), [0] * 400)) == {0, 1, 2, 3}
