"""An export beside what its user would run instead: transformers' tokenizer and model, and PEFT's
adapter, not merged.

The parity gate compares the written files with our model in torch; this compares our model with one
that ssdevice has no part in. Otherwise a setting that we drop would be missing on both sides of the
gate.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.config import Schedule
from ssdevice.errors import ParityError
from ssdevice.export.crosscheck.generation import (
    check_settings,
    generation_config,
    neutral,
    unapplied,
)
from ssdevice.export.crosscheck.prompts import compare_prompts
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.reference import Cache, int32, jittered
from ssdevice.model.families import family_of
from ssdevice.model.loading import load_hf
from ssdevice.model.lora import check_peft
from ssdevice.model.mapped import released_after
from ssdevice.model.step import PrefillModule, StepModule, StreamModel
from ssdevice.model.tokenizer import tokenizer_folder
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree

SAME = 1e-4
"""Logits that differ by at most so many standard deviations of their row are equal in float32."""
JITTER = 1e-6
TWIN = 4.0
"""Beyond that they may differ by TWIN times what a random change of JITTER of every product makes
of them.

Float32 rounds to 6e-8. In models of 31 families of 3 to 48 layers, right logits differ by 0.02 to
0.6 of that change.
"""
CHUNK = 16


class Expected(NamedTuple):
    """What transformers computes of a text: ``logits [n, V]`` at ``tokens[first:]``.

    ``chosen``: the n tokens that ``generate`` puts there; None: it was not asked.
    """

    tokens: Sequence[int]
    first: int
    logits: Tensor
    chosen: Sequence[int] | None = None


def compare_logits(model: StreamModel, expected: Expected, whose: str) -> None:
    """Raise ParityError if the model has other logits, or if one of the ``chosen`` tokens is not
    the likeliest.
    """
    ours = our_logits(model, expected.tokens, expected.first)
    first = expected.first
    size = expected.logits.std(-1).clamp(min=torch.finfo(torch.float32).tiny)
    off = (ours - expected.logits).abs().amax(-1) / size
    allowed = SAME
    if not bool((off <= allowed).all()):  # also if there is a NaN
        with jittered(model, JITTER, torch.Generator().manual_seed(0)):
            twin = our_logits(model, expected.tokens, first)
        allowed = max(SAME, TWIN * float(((twin - ours).abs().amax(-1) / size).max()))
    for row, value in enumerate(off.tolist()):
        if not value <= allowed:
            again = float(
                ((our_logits(model, expected.tokens, first) - ours).abs().amax(-1) / size).max()
            )
            if again > SAME:
                raise ParityError(
                    f"{whose}: the same logits, computed twice, differ by {again:.2g} of their "
                    f"standard deviation: torch or this machine is at fault, not the model; try "
                    f"again"
                )
            raise ParityError(
                f"{whose}: the logits at token {first + row + 1} of a text of "
                f"{len(expected.tokens)} differ from those of transformers by {value:.2g} of their "
                f"standard deviation, allowed is {allowed:.2g}: ssdevice does not compute this "
                f"model as transformers does"
            )
    if expected.chosen is None:
        return
    best, likeliest = ours.max(-1)
    short = (best - ours.gather(1, torch.tensor(expected.chosen)[:, None])[:, 0]) / size
    for row, value in enumerate(short.tolist()):
        if not value <= 2 * allowed:
            raise ParityError(
                f"{whose}: generate(do_sample=False) of transformers gives token "
                f"{expected.chosen[row]} as number {row + 1} of its answer, the likeliest is "
                f"{int(likeliest[row])}: something in the model's folder changes what generate "
                f"does, and ssdevice does not know it"
            )


@torch.no_grad()
def our_logits(model: StreamModel, tokens: Sequence[int], first: int) -> Tensor:
    """Logits ``[n, V]`` at ``tokens[first:]``: prefill in chunks of those before, then a step with
    them as drafts.
    """
    backbone = model.backbone
    size = (len(backbone.layers), 2, 1, backbone.kv_heads, first + CHUNK, backbone.head_dim)
    cache = Cache(torch.zeros(size))
    prefill = PrefillModule(model, CHUNK, 1)
    root, *drafts = tokens[first:]
    step = StepModule(model, Tree.chain(len(drafts)), 1, Schedule.DEFERRED)
    given = torch.tensor(drafts).int()[:, None]
    with released_after((*backbone.layers, backbone.lm_head)):
        for at in range(0, first, CHUNK):
            part = list(tokens[at : min(at + CHUNK, first)])
            ids = torch.tensor(part + [0] * (CHUNK - len(part)), dtype=torch.int32)
            cache.commit(prefill(ids, int32(len(part)), int32(at), cache.past()).rows, len(part))
        logits: Tensor = step(int32(root), given, int32(first), cache.past()).logits
    return logits


TOKENS = 32
"""Of the answer to the first prompt; of the others' logits, those of so many tokens at most are
compared.
"""
MAPPED = 1 << 28
"""A model of more bytes in float32 is read with its weights mapped: a second one need not fit into
memory.
"""


@torch.no_grad()
def expected_of(
    folder: Path,
    adapters: Sequence[Path | None],
    prompts: Sequence[list[int]],
    context: int,
    scratch: Path | None,
) -> list[list[Expected]]:
    """Of every adapter (None: the base without one), what transformers computes of every prompt.

    An answer is generated to the first one. ``context``: no text is longer. ``scratch``: map
    weights there instead of holding them in memory, see ``load_hf``. The model is gone when this
    returns.
    """
    first, *others = (prompt[: max(1, context - TOKENS)] for prompt in prompts)
    hf = _load(folder, scratch)
    found = []
    with (
        warnings.catch_warnings(),
        released_after(hf.get_submodule(family_of(hf.config.model_type).layers_path)),
    ):
        warnings.simplefilter(
            "ignore"
        )  # of settings that do not go together, of a base that was moved
        for adapter in adapters:
            with _with_adapter(hf, adapter) as model:
                answer = _generate(model, first, min(TOKENS, context - len(first)))
                texts = [_expected(model, [*first, *answer[:-1]], len(first) - 1, answer)]
                texts += [
                    _expected(model, prompt, max(len(prompt) // 2, len(prompt) - TOKENS))
                    for prompt in others
                ]
            found.append(texts)
    return found


def _load(folder: Path, scratch: Path | None) -> Any:
    from transformers import AutoModelForCausalLM

    # Not "sdpa", which leaves out what it cannot do, such as Gemma 2's soft cap.
    wanted: Any = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    if scratch is not None:
        hf = load_hf(folder, scratch=scratch)
        hf.set_attn_implementation(wanted["attn_implementation"])
    else:
        hf = AutoModelForCausalLM.from_pretrained(folder, **wanted)
    hf.config.return_dict = True  # generate asks for it, whatever the file says
    own = generation_config(folder)
    # Where settings are known to change the answer, the rest is compared without them.
    hf.generation_config = neutral(own) if unapplied(own) else own
    return hf.eval()


@contextmanager
def _with_adapter(hf: Any, adapter: Path | None) -> Iterator[Any]:
    """The model with an adapter beside its weights, not merged, as long as the context lasts."""
    if adapter is None:
        yield hf
        return
    from peft import PeftModel

    check_peft(adapter)
    wrapped: Any = PeftModel.from_pretrained(hf, str(adapter))
    yield wrapped.eval()
    wrapped.unload()


def _generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    given = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": count,
        "pad_token_id": 0,
    }
    form = {"cache_implementation": None, "return_dict_in_generate": False}
    out: list[int] = model.generate(input_ids=ids, **given, **form)[0].tolist()
    return out[len(prompt) :]


def _expected(
    model: Any, tokens: list[int], first: int, chosen: list[int] | None = None
) -> Expected:
    logits = (
        model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, first:].float().clone()
    )
    return Expected(tokens, first, logits, chosen)


SKIPPED = (
    "not compared with transformers (--no-cross-check): prompt ids, logits and answers may differ "
    "from its own"
)
"""The note in a bundle that was not compared."""
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "CREATE TABLE orders (id, city, total)\nHow many orders came from Berlin?",
    "Was heißt „Überraschung“ auf Japanisch? 日本語で 😀",
)


def check_export(job: ExportJob) -> None:
    """Compare the models of a job's apps; the plan has compared the prompts' ids.

    Raises ParityError.
    """
    plan = job.plan
    # Main rows without a LoRA are the base's, which those with a LoRA need as well.
    apps = [app for app in plan.apps if app.has_lora] or plan.apps[:1]
    loras = [app.folder if app.has_lora else None for app in apps]
    scratch = plan.options.out.parent if 4 * sum(plan.parameters.values()) > MAPPED else None
    prompts = list(map(plan.tokenizer.prompt_ids, PROMPTS))
    expected = expected_of(plan.folder, loras, prompts, plan.geometry.context, scratch)
    for app, lora, texts in zip(apps, loras, expected, strict=True):
        model = (job if app is plan.apps[0] else job.for_app(app)).loaded.model
        for text in texts:
            compare_logits(model, text, str(lora or plan.folder))


Loading = Callable[[], StreamModel]


def check_model(
    folder: Path,
    adapter: Path | None,
    tokenizer: ChatTokenizer,
    context: int,
    choose: bool,
    model: Loading,
) -> tuple[str, ...]:
    """Compare the base in ``folder`` with an adapter as an export does; returns its notes and
    raises its errors.

    ``choose``: the host can choose tokens. ``model``: loads ours, when that of transformers is gone
    from memory.
    """
    notes = (
        *compare_prompts(tokenizer, tokenizer_folder(folder, adapter)),
        *check_settings(tokenizer, folder, choose),
    )
    lora = adapter if adapter is not None and AdapterFolder.open(adapter).has_lora else None
    (expected,) = expected_of(
        folder, [lora], list(map(tokenizer.prompt_ids, PROMPTS)), context, None
    )
    for text in expected:
        compare_logits(model(), text, str(lora or folder))
    return notes
