"""Apps of one program: each decodes as it would alone, switching moves its factors and nothing
else.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

pytest.importorskip("executorch")

from safetensors.numpy import load_file, save_file

from ssdevice.adapters.slots import LAYOUT_FILE, read_layout
from ssdevice.bundle.folder import Bundle
from ssdevice.bundle.manifest import AdapterKind
from ssdevice.cli import main
from ssdevice.config import Mode, Schedule
from ssdevice.errors import BundleError, ConfigError
from ssdevice.export.executorch.exporter import ExecutorchExporter
from ssdevice.export.executorch.slots import SlotFactors
from ssdevice.export.plan import Quant, make_plan
from ssdevice.export.stages import export_bundle
from ssdevice.model.streams import LowRank
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.executorch.engine import ADAPTER_FILE, ExecutorchEngine
from ssdevice.runtime.executorch.program import SET_ADAPTER, AdapterSlots
from ssdevice.runtime.session import Session
from tests.export.executorch import programs
from tests.export.models import write_adapter, write_lora

pytestmark = pytest.mark.lowering

PROMPT = "a b"
SWITCH_SECONDS = 0.25
"""Far above what a switch takes, far below what loading takes."""


def engine(app: str, opened: Bundle | None = None) -> ExecutorchEngine:
    found = open_engine(opened or programs.slots(), app, EngineOptions())
    assert isinstance(found, ExecutorchEngine)
    return found


@pytest.fixture
def session() -> Iterator[Session]:
    with Session.open(programs.slots()) as opened:
        yield opened


def answers(session: Session, app: str) -> list[int]:
    session.use(app)
    list(session.generate(PROMPT, max_tokens=12))
    return list(session.last.tokens)


def test_every_app_was_compared_with_a_reference_of_its_own() -> None:
    manifest = programs.slots().manifest
    assert [(app.name, app.kind) for app in manifest.apps] == [
        ("one", AdapterKind.SLOT),
        ("two", AdapterKind.SLOT),
        ("base", AdapterKind.BASE),
    ]
    for name in ("one", "two", "base"):
        assert manifest.parity[f"{name}.rows"] < 1e-3
    assert manifest.parity["products"] > 100  # of the program, with the slots of one app
    assert (
        manifest.parity["one.counts"]
        == manifest.parity["two.counts"]
        == programs.slots().geometry.tree.emitted
    )
    assert set(manifest.apps[0].functions) > set(manifest.apps[2].functions)


def test_an_app_decodes_the_same_after_any_other(session: Session) -> None:
    alone = {}
    for app in ("one", "two", "base"):
        with Session.open(programs.slots(), app=app) as other:
            list(other.generate(PROMPT, max_tokens=12))
            alone[app] = list(other.last.tokens)
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    for app in ("one", "two", "one", "base", "two", "base", "one"):
        assert answers(session, app) == alone[app]


def test_speculation_changes_no_token(session: Session) -> None:
    for app in ("one", "two"):
        expected = answers(session, app)
        list(session.generate(PROMPT, max_tokens=12, speculate=False))
        assert list(session.last.tokens) == expected


def test_engines_of_a_bundle_share_one_program_and_switch_in_it(session: Session) -> None:
    answers(session, "one"), answers(session, "two")
    first = engine("one")
    second = engine("two")
    assert first.program is second.program is session.engine.program  # type: ignore[attr-defined]
    one = first.new_conversation()
    two = second.new_conversation()
    with first.program.lock:
        clocks = []
        for conversation in (one, two, one):
            clock = perf_counter()
            first.program.seat(conversation.cache, "step")  # type: ignore[arg-type]
            clocks.append(perf_counter() - clock)
    assert max(clocks) < SWITCH_SECONDS
    first.close()
    second.close()


def test_conversations_of_two_apps_taking_turns_give_what_each_gives_alone() -> None:
    def start(app: str) -> tuple[ExecutorchEngine, list[int]]:
        opened = engine(app)
        return opened, []

    def advance(conversation: object, tokens: list[int]) -> None:
        run = conversation.step(tokens[-1])  # type: ignore[attr-defined]
        conversation.length += len(run)  # type: ignore[attr-defined]
        tokens.extend(run)

    engines = [engine("one"), engine("two")]
    alone = []
    for opened in engines:
        conversation = opened.new_conversation()
        tokens = [conversation.prefill([7, 21, 3])]
        conversation.length = 3
        for _ in range(4):
            advance(conversation, tokens)
        alone.append(tokens)
    turns = [opened.new_conversation() for opened in engines]
    found = [[conversation.prefill([7, 21, 3])] for conversation in turns]
    for conversation in turns:
        conversation.length = 3
    for _ in range(4):
        for conversation, tokens in zip(turns, found, strict=True):
            advance(conversation, tokens)
    assert found == alone
    for opened in engines:
        opened.close()


def test_set_adapter_takes_the_files_tensors_in_the_order_of_their_names() -> None:
    opened = engine("base")
    conversation = opened.new_conversation()
    base = conversation.prefill([7, 21, 3])
    file = programs.slots().file(programs.slots().app("one").files[0])
    tensors = AdapterSlots(file).tensors
    assert list(tensors) == sorted(tensors)
    opened.program.method(SET_ADAPTER).call(
        [torch.from_numpy(tensors[name]) for name in sorted(tensors)]
    )
    by_hand = (
        conversation.cache.rows(0, 3),
        conversation.prefill([7, 21, 3]),
        conversation.cache.rows(0, 3),
    )
    opened.close()
    again = engine("one")
    other = again.new_conversation()
    assert (by_hand[1], base) == (other.prefill([7, 21, 3]), base)
    np.testing.assert_array_equal(by_hand[2], other.cache.rows(0, 3))
    assert not np.array_equal(by_hand[0], by_hand[2])
    again.close()


def _damaged(tmp_path: Path, change: object) -> AdapterSlots:
    source = programs.slots().file(programs.slots().app("one").files[0])
    tensors = load_file(source)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / ADAPTER_FILE)
    return AdapterSlots(tmp_path / ADAPTER_FILE)


NAME = "module.model.backbone.layers.0.self_attn.q_proj.adapter.up"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), "tensors, the program has .* slots"),
        (lambda t: t.update({"other": t.pop(NAME)}), "has no slot 'other'"),
        (
            lambda t: t.update({NAME: t[NAME][:, :1].copy()}),
            "q_proj.adapter.up' has shape .*, its slot",
        ),
    ],
)
def test_an_adapter_of_another_program_is_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    opened = engine("base")
    conversation = opened.new_conversation()
    conversation.cache.adapter = _damaged(tmp_path, change)
    with pytest.raises(BundleError, match=message):
        conversation.prefill([7, 21, 3])
    conversation.cache.adapter = None
    expected = engine("base")
    assert conversation.prefill([7, 21, 3]) == expected.new_conversation().prefill([7, 21, 3])
    opened.close()
    expected.close()


def test_a_damaged_adapter_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(programs.slots().folder, copied)
    file = next(copied.rglob(ADAPTER_FILE))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="damaged"):
        Session.open(copied)


def test_apps_of_two_modes_cannot_share_a_program(tmp_path: Path) -> None:
    base = programs.base()
    lossless = write_adapter(
        tmp_path / "lossless", base, Mode.LOSSLESS, gamma=2, msa_layers=1, token_rank=3
    )
    options = programs.options(Quant.FP32, Mode.SHARED, Schedule.DEFERRED, tmp_path / "out")
    apps = (*programs.two_apps(Mode.SHARED), ("quiet", lossless))
    with pytest.raises(
        ConfigError, match=r"'one' \(shared streams.*'quiet' \(lossless streams.*a bundle for each"
    ):
        make_plan(replace(options, model=str(base), adapters=apps), ExecutorchExporter())


def test_factors_filled_up_with_zeros_compute_the_same() -> None:
    torch.manual_seed(0)
    low = LowRank(6, 5, 2, activation=True)
    torch.nn.init.normal_(low.up.weight)
    slot = SlotFactors(6, 5, 4, activation=True)
    slot.down[0, :, :2] = low.down.weight.detach().T
    slot.up[0, :2] = low.up.weight.detach().T
    x = torch.randn(1, 3, 6)
    torch.testing.assert_close(slot(x), low(x))


def test_an_app_added_later_is_the_app_exported_with_the_rest(tmp_path: Path) -> None:
    whole = programs.slots()
    copied = tmp_path / "bundle"
    shutil.copytree(whole.folder, copied)
    folders = dict(programs.two_apps(Mode.SHARED))
    assert main(["bundle", "remove-app", str(copied), "two", "--quiet"]) == 0
    assert main(["bundle", "add-app", str(copied), f"two={folders['two']}", "--quiet"]) == 0
    added = Bundle.open(copied).app("two")
    known = whole.app("two")
    assert (added.kind, added.mode, added.functions) == (known.kind, known.mode, known.functions)
    made, exported = (
        load_file(opened.folder / opened.app("two").files[0])
        for opened in (Bundle.open(copied), whole)
    )
    assert made.keys() == exported.keys()
    assert all(np.array_equal(made[name], exported[name]) for name in made)
    with Session.open(whole) as session, Session.open(Bundle.open(copied)) as other:
        assert answers(other, "two") == answers(session, "two")
        assert answers(other, "one") == answers(session, "one")


def test_an_adapter_in_bytes_is_widened_when_it_is_loaded(tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(programs.slots().folder, copied)
    folder = dict(programs.two_apps(Mode.SHARED))["two"]
    assert (
        main(
            [
                "bundle",
                "add-app",
                str(copied),
                f"small={folder}",
                "--adapter-precision",
                "int8",
                "--quiet",
            ]
        )
        == 0
    )
    made = Bundle.open(copied)
    small, whole = (made.folder / made.app(name).files[0] for name in ("small", "two"))
    assert small.stat().st_size < 0.75 * whole.stat().st_size
    found = AdapterSlots(small).tensors
    exact = AdapterSlots(whole).tensors
    assert found.keys() == exact.keys()
    assert all(
        np.abs(found[name] - exact[name]).max() <= 0.01 * np.abs(exact[name]).max()
        for name in exact
    )
    with Session.open(made) as session:
        assert answers(session, "small")


def test_what_does_not_fit_the_slots_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(programs.slots().folder, copied)
    before = (copied / "manifest.json").read_bytes()
    base = programs.base()
    wide = write_adapter(tmp_path / "wide", base, Mode.SHARED, gamma=2, msa_layers=1)
    write_lora(wide, base, rank=5, seed=1)
    lossless = write_adapter(tmp_path / "lossless", base, Mode.LOSSLESS, gamma=2, msa_layers=1)
    merged = str(programs.bundle().folder)
    capsys.readouterr()  # what making them said
    for folder, message in (
        (wide, "a rank of at most 4"),
        (lossless, "has no graphs for lossless streams"),
        (tmp_path / "none", "no such folder"),
    ):
        assert main(["bundle", "add-app", str(copied), f"new={folder}"]) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1
    assert (copied / "manifest.json").read_bytes() == before
    assert main(["bundle", "add-app", merged, f"new={wide}"]) == 2
    assert "its adapter is part of the graphs" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(Schedule))
def test_lossless_apps_share_a_program(schedule: Schedule) -> None:
    opened = programs.slots(Mode.LOSSLESS, Quant.FP32, schedule)
    found = []
    with Session.open(opened, app="one") as session:
        ids = session.prompt_ids(PROMPT)  # with its instruction, which the base has not
        for app in ("one", "two", "base"):
            session.use(app)
            list(session.runs(ids, max_tokens=12, mode="plain" if app == "base" else "speculative"))
            found.append(session.last.tokens)
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_apps_that_see_the_chosen_token_share_a_program_with_a_rank_for_every_slot(
    tmp_path: Path,
) -> None:
    base = programs.base()
    narrow = {"gamma": 2, "token_rank": 5, "adapter_rank": 3}
    wide = {"gamma": 3, "token_rank": 9, "adapter_rank": 2}  # more streams than the program runs
    apps = tuple(
        (name, write_adapter(tmp_path / name, base, Mode.LOSSLESS, msa_layers=1, **ranks))
        for name, ranks in (("one", narrow), ("two", wide))
    )
    options = programs.options(Quant.FP32, Mode.LOSSLESS, Schedule.DEFERRED, tmp_path / "out")
    export_bundle(replace(options, adapters=apps), lambda *_: None)
    opened = Bundle.open(tmp_path / "out")
    layout = read_layout(opened.folder / LAYOUT_FILE)
    found_ranks = {slot.sources[0]: slot.rank for slot in layout.variants[0].slots}
    assert found_ranks.pop("token") == 9 and set(found_ranks.values()) == {3}
    found = []
    with Session.open(opened, app="one") as session:
        ids = session.prompt_ids(PROMPT)
        for app in ("one", "two", "base"):
            session.use(app)
            list(session.runs(ids, max_tokens=12, mode="plain" if app == "base" else "speculative"))
            found.append(session.last.tokens)
    assert found[0] == found[1] == found[2]
