"""``research/trained.py`` and ``rivals.py``: drafters draft, learn and are counted as written out
row by row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, silu, smooth_l1_loss
from transformers import DynamicCache

from research import dynamic, heads, rivals, trained
from research.mixture import Attention, Mixture
from research.rivals import RIVALS
from research.trained import Base, Drafter, Main
from ssdevice.model import loading
from ssdevice.text.tokenizer import Sample
from ssdevice.train import checkpoint
from ssdevice.train.batches import collate
from ssdevice.model.decoding import Decoding
from ssdevice.tree import MISS, Tree, tokens_per_step
from tests.runtime import tiny_bundle as tiny

GAMMA = 3
IDS = [*range(20), *range(19, 5, -1), 1, 5, 9, 3]  # longer than the window of 24
PROMPT = 27
DRAFTED = [*range(2, 22)]


def new_base(ids: Sequence[int] | None = None) -> Base:
    model = loading.build(loading.load_hf(tiny.base_folder()), None, 96)
    return Base(model.backbone, GAMMA, torch.tensor(ids) if ids else None)


def moved(name: str, base: Base) -> Drafter:
    """A drafter away from where it begins."""
    drafter = rivals.new(name, base, 0)
    with torch.no_grad():
        for value in drafter.parameters():
            value += 0.2 * torch.randn_like(value)
    return drafter


@cache
def library() -> Any:
    hf = loading.load_hf(tiny.base_folder())
    hf.config._attn_implementation = "eager"
    return hf


@torch.no_grad()
def library_main(ids: Sequence[int]) -> Main:
    """The rows of one sequence by the library's own model, without the dimension of a batch."""
    model = library().model
    last = list[Tensor]()
    with model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0])):
        out = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=True)
    rows = [(layer.keys[0], layer.values[0]) for layer in whole_cache(ids)]
    return Main(out.last_hidden_state[0], [*(h[0] for h in out.hidden_states[:-1]), *last], rows)


def whole_cache(ids: Sequence[int]) -> Any:
    """Keys and values of all rows, beyond the window as well."""
    cache = DynamicCache()
    library().model(torch.tensor([list(ids)]), past_key_values=cache)
    return cache.layers


def library_states(ids: Sequence[int]) -> Tensor:
    """What the LM head reads, ``[S, D]``, by the library's own model."""
    return library_main(ids).states


def up_to(main: Main, count: int, garbage: int = 0) -> Main:
    """The first ``count`` rows, and others that must not be read."""
    more = (0, 0, 0, garbage)
    layers = [pad(h[:count], more, value=7.0) for h in main.layers]
    rows = [
        (pad(k[:, :count], more, value=7.0), pad(v[:, :count], more, value=7.0))
        for k, v in main.rows
    ]
    return Main(pad(main.states[:count], more, value=7.0), layers, rows)


def as_batch(main: Main) -> Main:
    return Main(
        main.states[None],
        [h[None] for h in main.layers],
        [(k[None], v[None]) for k, v in main.rows],
    )


def eagle_state(drafter: trained.Eagle, states: Tensor, tokens: Sequence[int], j: int) -> Tensor:
    """The state that EAGLE makes for guess j, all rows of its layer computed again for each."""
    embedding = drafter.base.backbone.embed_tokens.weight
    known = list(states)
    for _ in range(j + 1):
        rows = [
            drafter.fc(torch.cat([embedding[tokens[i + 1]], state]))
            for i, state in enumerate(known)
        ]
        positions, masks = drafter.base.causal(len(rows))
        known.append(
            drafter.base.layer(drafter.layer, torch.stack(rows)[None], positions, masks)[0][0, -1]
        )
    return known[-1]


def layer_row(
    layer: Attention, x: Tensor, rows: Sequence[tuple[Tensor, Tensor]], at: int | None
) -> Tensor:
    """A layer of the mixture on row ``x`` at position ``at``, which sees all ``rows``: keys and
    values ``[heads, d]``.

    ``at`` None: without positions.
    """

    def turned(part: Tensor, positions: Tensor) -> Tensor:
        if at is None:
            return part
        half = layer.dim // 2
        angle = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
        z = torch.complex(*part.split(half, 1)) * torch.polar(torch.ones(angle.shape), angle)
        return torch.cat([z.real, z.imag], 1)

    query = (layer.query.weight @ normed(layer.before, x)).view(-1, layer.dim)
    read = []
    for number, q in enumerate(query):
        head = number * len(rows[0][0]) // len(query)
        keys = turned(torch.stack([k[head] for k, _ in rows]), torch.arange(len(rows)))
        scores = keys @ turned(q[None], torch.tensor([at or 0]))[0]
        read.append(
            torch.softmax(scores / layer.dim**0.5, 0) @ torch.stack([v[head] for _, v in rows])
        )
    x = x + layer.out.weight @ torch.cat(read)
    y = normed(layer.between, x)
    return x + layer.down.weight @ (silu(layer.gate.weight @ y) * (layer.up.weight @ y))


def normed(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x / (x.square().mean() + 1e-6).sqrt()


def halves(layer: Attention, row: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = row.chunk(2)
    return keys.view(-1, layer.dim), values.view(-1, layer.dim)


def mixture_state(
    drafter: Mixture, main: Main, tokens: Sequence[int], j: int
) -> tuple[Tensor, Tensor]:
    """What Mixture of Attentions makes for guess j after the last row of ``main``, and what the LM
    head reads.
    """
    embedding = drafter.base.backbone.embed_tokens.weight
    count = len(main.states)
    own = drafter.tokens
    words = [embedding[token] for token in tokens[: count + j + 1]]
    seen = [halves(own, own.rows.weight @ normed(own.before, word)) for word in words]
    memory = []
    for row in range(count):
        layers = [torch.cat([k[:, row].flatten(), v[:, row].flatten()]) for k, v in main.rows]
        depths = [
            halves(drafter.depths, drafter.depths.rows.weight @ normed(drafter.depths.before, x))
            for x in layers
        ]
        mixed = [layer_row(drafter.depths, x, depths, None) for x in layers]
        memory.append(halves(drafter.across, torch.stack(mixed).mean(0)))
    made = [
        layer_row(drafter.across, layer_row(own, words[at], seen[: at + 1], at), memory, at)
        for at in range(count, count + j + 1)
    ]
    h = torch.stack(made)
    first = drafter.first
    if drafter.UPPER:
        model, h = library().model, torch.cat([main.layers[first], h])
        at = torch.arange(len(h))
        hidden = (at[:, None] < at) | (at[:, None] - at >= model.config.sliding_window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)[None, None]
        for layer in model.layers[first:]:
            h = layer(
                h[None], attention_mask=mask, position_embeddings=model.rotary_emb(h, at[None])
            )[0]
    return made[-1], library().model.norm(h[-1])


def guess(drafter: Drafter, main: Main, tokens: Sequence[int], j: int) -> Tensor:
    """Logits of guess j after the last row of ``main``, from nothing else; ``tokens``: up to t + 1
    + j.
    """
    base = drafter.base
    states = main.states
    h = states[-1]
    embedding = base.backbone.embed_tokens.weight
    t = len(states) - 1
    width = base.width
    if isinstance(drafter, trained.BPD):
        part = slice(j * width, (j + 1) * width)
        hidden = (drafter.up.weight @ h + drafter.up.bias).clamp(min=0)
        return base.head.weight @ (h + drafter.down.weight[part] @ hidden + drafter.down.bias[part])
    if isinstance(drafter, Mixture):
        return base.head.weight @ mixture_state(drafter, main, tokens, j)[1]
    if isinstance(drafter, trained.Eagle):
        return base.head.weight @ eagle_state(drafter, states, tokens, j)
    if isinstance(drafter, trained.HydraPlusPlus):
        positions, masks = base.causal(t + 1)
        h = base.layer(drafter.layer, states[None], positions, masks)[0][0, -1]
    blocks = drafter.blocks[j]
    head = drafter.heads[j]
    if isinstance(drafter, trained.Medusa):
        return head.weight @ (h + silu(blocks.linear.weight @ h + blocks.linear.bias))
    first, *deeper = blocks
    x = torch.cat([h, *(embedding[token] for token in tokens[t + 1 : t + 2 + j])])
    y = first.skip.weight @ x + first.skip.bias + silu(first.linear.weight @ x + first.linear.bias)
    for block in deeper:
        y = y + silu(block.linear.weight @ y + block.linear.bias)
    return head.weight @ y


@torch.no_grad()
def test_states_are_the_librarys_and_no_drafter_has_weights_of_the_base() -> None:
    base = new_base()
    mine = base.main(torch.tensor([IDS]))
    theirs = library_main(IDS)
    flat = [
        [main.states, *main.layers, *(part for row in main.rows for part in row)]
        for main in (mine, theirs)
    ]
    assert all(torch.allclose(a[0], b, atol=1e-4) for a, b in zip(*flat, strict=True))
    of_base = {id(p) for p in base.backbone.parameters() if not p.requires_grad}
    for name in RIVALS:
        assert not of_base & {id(p) for p in rivals.new(name, base, 0).parameters()}


@torch.no_grad()
@pytest.mark.parametrize("name", RIVALS)
def test_drafts_are_those_made_one_by_one_from_scratch(name: str) -> None:
    """Rows of any number at once, with the states of later rows there, draft as a row with nothing
    after it.
    """
    base = new_base(DRAFTED)
    drafter = moved(name, base)
    main = library_main(IDS)
    nodes = range(2, len(IDS) - 1, 3 if name in trained.RIVALS else 9)
    drafted = []
    for t in nodes:
        tokens = IDS[: t + 2]
        for j in range(GAMMA):
            logits = guess(drafter, up_to(main, t + 1), tokens, j)
            given = torch.tensor([tokens + [0] * (GAMMA - j)])
            rows = as_batch(up_to(main, t + 1, given.shape[1] - t - 1))
            mine = drafter.guesses(given, rows, torch.tensor([[t]]))[0, 0, j]
            assert torch.allclose(mine, logits, rtol=1e-4, atol=1e-3), (t, j)
            tokens.append(DRAFTED[int(logits.argmax())])
        drafted.append(tokens[t + 2 :])
    assert len(set(map(tuple, drafted))) > 1
    along = drafter.guesses(torch.tensor([IDS]), as_batch(main), torch.tensor([list(nodes)]))[0]
    for row, t in zip(along, nodes, strict=True):
        for j in range(min(GAMMA, len(IDS) - t - 1)):
            assert torch.allclose(
                row[j], guess(drafter, up_to(main, t + 1), IDS, j), rtol=1e-4, atol=1e-3
            )


@pytest.mark.parametrize("name", RIVALS)
def test_losses_are_those_of_the_papers_written_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained.Eagle, "NOISE", 0.0)
    base = new_base(DRAFTED)
    drafter = moved(name, base)
    samples = [Sample(tuple(IDS), PROMPT), Sample(tuple(IDS[3:15]), 4)]
    batch = collate(samples, 0)
    mine = drafter.loss(batch, base.main(batch.tokens), torch.Generator())
    weight = {"BPD": [1 / GAMMA] * GAMMA, "Medusa-1": [0.8, 0.64, 0.512]}.get(name, [1.0] * GAMMA)
    by_guess: list[list[Tensor]] = [[] for _ in range(GAMMA)]
    of_states: list[Tensor] = []
    for sample in samples:
        main = library_main(sample.ids)
        states = main.states
        if isinstance(drafter, Mixture):
            begins = drafter.pieces(
                len(IDS) - PROMPT, torch.Generator()
            ).tolist()  # of the longest completion
            for i in range(len(sample.ids) - sample.prompt - 1):
                known = sample.prompt + begins[i]
                j = i - begins[i]
                state, read = mixture_state(drafter, up_to(main, known), sample.ids, j)
                of_states.append(smooth_l1_loss(state, main.layers[drafter.first][known + j]))
                wanted = torch.softmax(base.head.weight @ states[known + j], -1)
                by_guess[0].append(cross_entropy(base.head.weight @ read, wanted))
            continue
        for t in range(sample.prompt - 1, len(sample.ids) - 1):
            for j in range(GAMMA if name != "EAGLE" else 1):
                if t + j + 2 >= len(sample.ids) or (
                    name != "EAGLE" and sample.ids[t + j + 2] not in DRAFTED
                ):
                    continue
                logits = guess(drafter, up_to(main, t + 1), sample.ids, j)
                if name in ("EAGLE", "Hydra++"):
                    wanted = torch.softmax(base.head.weight @ states[t + j + 1], -1)
                else:
                    wanted = torch.tensor(DRAFTED.index(sample.ids[t + j + 2]))
                by_guess[j].append(cross_entropy(logits, wanted))
            if isinstance(drafter, trained.Eagle) and t + 2 < len(sample.ids):
                of_states.append(
                    smooth_l1_loss(
                        eagle_state(drafter, states[: t + 1], sample.ids, 0), states[t + 1]
                    )
                )
    if of_states:
        expected = torch.stack(of_states).mean() + 0.1 * torch.stack(by_guess[0]).mean()
    else:
        expected = sum(
            w * torch.stack(each).mean() for w, each in zip(weight, by_guess, strict=True)
        )
    assert float(mine.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    mine.backward()  # type: ignore[no-untyped-call]
    learned = {
        n for n, p in drafter.named_parameters() if p.grad is not None and bool(p.grad.any())
    }
    assert learned == {n for n, _ in drafter.named_parameters()}
    assert all(p.grad is None for p in base.backbone.parameters() if not p.requires_grad)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Medusa-1", "Hydra"])
def test_heads_begin_as_the_lm_head(name: str) -> None:
    base = new_base()
    drafter = rivals.new(name, base, 0)
    tokens = torch.tensor([IDS])
    main = base.main(tokens)
    guesses = drafter.guesses(tokens, main, torch.arange(len(IDS))[None])
    for j in range(GAMMA):
        assert torch.allclose(guesses[:, :, j], base.logits(main.states), atol=1e-5)


def answered(base: Base) -> Sample:
    """The base's own answer to the first tokens of IDS."""
    ((_, answer),) = Decoding(base.backbone, [IDS[:8]], {0}, [24])
    return Sample((*IDS[:8], *answer), 8)


def taught_some(drafter: Drafter, sample: Sample, steps: int) -> None:
    """Train a drafter on one sample."""
    batch = collate([sample], 0)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    main = drafter.base.main(batch.tokens)
    for _ in range(steps):
        optimizer.zero_grad()
        drafter.loss(batch, main, torch.Generator().manual_seed(0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_counted_along_an_answer_is_what_decoding_takes(name: str) -> None:
    """A loop that drafts with its own drafts, verifies them with the library's model, and emits the
    same answer.
    """
    base = new_base()
    prompt = IDS[:8]
    sample = answered(base)
    answer = sample.ids[len(prompt) :]
    drafter = rivals.new(name, base, 0)
    slow = name not in trained.RIVALS  # its reference above, and to learn
    taught_some(drafter, sample, 100 if slow else 25)
    weight = base.backbone.lm_head.weight
    for depth in range(GAMMA if slow else 1, GAMMA + 1):
        emitted = [int((library_states(prompt)[-1] @ weight.T).argmax())]
        steps = 0
        while len(emitted) < len(answer):
            known = [*prompt, *emitted]
            before = up_to(library_main(known), len(known) - 1)
            drafts: list[int] = []
            for j in range(depth):
                with torch.no_grad():
                    drafts.append(int(guess(drafter, before, [*known, *drafts], j).argmax()))
            chosen = (
                (library_states([*known, *drafts])[len(known) - 1 :] @ weight.T).argmax(-1).tolist()
            )
            right = next((j for j in range(depth) if drafts[j] != chosen[j]), depth)
            emitted += chosen[: right + 1]
            steps += 1
        assert emitted[: len(answer)] == [*answer]
        ((ranks, _),) = rivals.counted(drafter.base, [drafter], [sample])
        beta = tokens_per_step(ranks, Tree.chain(depth))
        assert beta == pytest.approx((len(answer) - 1) / steps)
    assert beta > (1.05 if slow else 1.2), "some drafts were right"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command on a tiny model with generated rows."""
    monkeypatch.setitem(rivals.OURS, "streams", ("--msa-layers", "1", "--token-rank", "4"))
    rows = [
        {"prompt": text * 2, "completion": text * 3}
        for text in ("abc", "bca", "hello", "aab", "cab")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    made = [
        "--base",
        str(tiny.base_folder()),
        "--data",
        file,
        "--dev",
        file,
        "--out",
        str(tmp_path / "out"),
    ]
    return [
        *made,
        "--steps",
        "4",
        "--batch-size",
        "2",
        "--max-length",
        "64",
        "--precision",
        "fp32",
        "--gamma",
        "2",
    ]


def test_one_command_trains_and_counts_all_and_runs_nothing_twice(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rivals.main([*words, "--draft-vocabulary", "16"])
    shown = capsys.readouterr().out
    assert all(f"| {name} |" in shown for name in (*RIVALS, *rivals.OURS))
    lines = [
        json.loads(text) for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    for line in lines:
        assert (
            line["parameters"] > 0
            and 1 <= line["beta"][0] <= line["beta"][1] <= 3
            and len(line["losses"]) == 2
        )
    monkeypatch.setattr(rivals, "run", lambda _: pytest.fail("everything is done"))
    rivals.main([*words, "--draft-vocabulary", "16"])
    assert capsys.readouterr().out == shown
    with pytest.raises(SystemExit, match="other options"):
        rivals.main(words)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "SAVE", 1)
    words = [*words, "--methods", "EAGLE"]
    rivals.main(words)
    whole = checkpoint.load(tmp_path / "out" / "eagle")
    words[words.index(str(tmp_path / "out"))] = str(tmp_path / "again")
    loss = trained.Eagle.loss
    calls = iter(range(2))

    def stops(*given: object) -> Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return loss(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr(trained.Eagle, "loss", stops)
        rivals.main(words)
    rivals.main(words)
    again = checkpoint.load(tmp_path / "again" / "eagle")
    assert whole is not None and again is not None and again["step"] == 4
    for name, value in whole["weights"].items():
        assert torch.equal(value, again["weights"][name])


def test_a_dynamic_tree_has_the_most_confident_drafts() -> None:
    """Level by level with lists of paths, every draft made from scratch along its own path."""
    base = new_base()
    drafter = rivals.new("EAGLE", base, 0)
    breadth = 4
    sample = answered(base)
    taught_some(drafter, sample, 20)
    found = dynamic.places(drafter, sample, breadth)
    assert len(found) == len(sample.ids) - sample.prompt
    main = library_main(sample.ids)
    for i, mine in enumerate(found):
        t = sample.prompt - 1 + i
        known = up_to(main, t + 1)
        level = [((), 0.0)]
        every = []
        for j in range(GAMMA):
            made = []
            for path, score in level:
                log = torch.log_softmax(guess(drafter, known, [*sample.ids[: t + 2], *path], j), -1)
                made += [
                    ((*path, token), score + log[token].item())
                    for token in log.topk(breadth)[1].tolist()
                ]
            every += made
            level = sorted(made, key=lambda each: -each[1])[:breadth]
        order = [path for path, _ in sorted(every, key=lambda each: -each[1])]
        right = [sample.ids[t + 2 : t + 3 + j] for j in range(GAMMA) if t + 2 + j < len(sample.ids)]
        expected = [order.index(path) if path in order else MISS for path in right]
        assert mine == expected + [MISS] * (GAMMA - len(right))
    assert {sum(place != MISS for place in row) for row in found} >= {0, 1, 2}


def test_the_command_counts_dynamic_trees_of_a_run(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rivals.main([*words, "--methods", "EAGLE"])
    out = words[words.index("--out") + 1]
    capsys.readouterr()
    dynamic.main([out, "--sizes", "1,3,9", "--breadth", "3"])
    rows = [
        line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line[2].isdigit()
    ]
    by_size = [float(row[1]) for row in rows]
    assert by_size == sorted(by_size) and 1 <= by_size[0] <= by_size[-1] <= 3


@torch.no_grad()
def test_similarities_of_heads_are_those_of_the_rows_they_stand_for() -> None:
    base = new_base()
    drafter = rivals.new("Medusa-1", base, 0)
    sample = answered(base)
    assert isinstance(drafter, trained.Medusa)
    found = heads.similarities(drafter, collate([sample], 0))
    states = library_states(sample.ids)
    for j in range(GAMMA):
        nodes = range(sample.prompt - 1, len(sample.ids) - 2 - j)
        cosines = [
            torch.cosine_similarity(states[t], states[t + 1 + j], dim=0).item() for t in nodes
        ]
        assert found["cosine"][j] == pytest.approx(sum(cosines) / len(cosines), abs=1e-4), (
            "a block begins as identity"
        )
        assert found["right tokens of the main row"][j] == 1, "the base's own answer"
