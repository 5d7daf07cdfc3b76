"""The documents are true: their commands parse, the README's chain and snippet run, links and files
exist.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from ssdevice import cli
from tests.documents import ROOT, blocks, commands, commands_of, documents, inline

OPTION = r"(?<![\w-])--[a-z][a-z-]*"
FOLDERS = ("ssdevice", "export", "runtime", "tests", "models", "docs", "apps", "research")
CHOSEN = re.compile(r"/[A-Z]{2,}\b.*")


@pytest.fixture(params=documents(), ids=str)
def document(request: pytest.FixtureRequest) -> Path:
    """Every document, relative to the root."""
    return ROOT / request.param


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end after their arguments were read."""
    for name in cli.COMMANDS:
        monkeypatch.setattr(cli.command_module(name), "run", lambda _: 0)


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options that each command's help names, those of its actions among them."""
    actions = ("sign", "add-app", "remove-app")
    helps = [(name,) for name in cli.COMMANDS] + [("bundle", action) for action in actions]
    found: dict[str, set[str]] = {}
    for command in helps:
        said = io.StringIO()
        with pytest.raises(SystemExit) as ended, redirect_stdout(said):
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        found.setdefault(command[0], set()).update(re.findall(OPTION, said.getvalue()))
    return found


@pytest.mark.usefixtures("nothing_runs")
def test_commands_are_understood(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(document):
        try:
            assert cli.main(command) == 0
        except SystemExit:
            pytest.fail(
                f"{document.name}: ssdevice {shlex.join(command)}: {capsys.readouterr().err}"
            )


def test_options_exist_where_the_text_names_them(
    document: Path, options: dict[str, set[str]]
) -> None:
    for code in inline(document):
        words = code.split()
        if words[0] == "ssdevice" and len(words) > 1 and not words[1].startswith("--"):
            assert words[1] in options, f"{document.name}: `{code}`: no such command"
            known = options[words[1]]
        elif words[0].startswith("--"):
            known = set().union(*options.values())
        else:
            continue
        unknown = set(re.findall(OPTION, code)) - known
        assert not unknown, f"{document.name}: `{code}`: no option {sorted(unknown)}"


def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        if ":" in target:
            continue  # on the web
        found = document.parent / path if path else document
        assert found.exists(), f"{document.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(found), (
            f"{document.name} links to {target}: no such heading"
        )


def test_files_named_in_the_text_exist(document: Path) -> None:
    named = [
        code
        for code in inline(document)
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*", code)
    ]
    # A name in capitals is for the reader to choose: the folder that it goes into must exist.
    missing = [code for code in named if not (ROOT / CHOSEN.sub("", code)).exists()]
    assert not missing, f"{document.name} names what does not exist: {missing}"


def test_the_code_that_the_page_of_the_papers_names_is_there() -> None:
    """A name before a link to a Python file is in that file."""
    page = (ROOT / "docs" / "paper.md").read_text("utf-8")
    named = re.findall(r"((?:`[\w.]+`(?:, )?)+) \(\[\w+\.py\]\(\.\./(\S+)\)\)", page)
    assert len(named) > 15
    for names, file in named:
        for name in re.findall(r"[\w.]+", names):
            known = re.findall(r"(?:class|def) (\w+)", (ROOT / file).read_text("utf-8"))
            assert set(name.split(".")) <= set(known), f"{name} is not in {file}"


def test_speed_ups_of_the_readme_have_a_source() -> None:
    """Each speed-up with an interval is in a page of docs, with the same interval and so with its
    command.
    """
    interval = re.compile(r"(\d+\.\d+)x?\*{0,2}(?: genai)? \((\d+\.\d+)(?: to |\.\.)(\d+\.\d+)")
    measured = {
        found
        for page in (ROOT / "docs").glob("*.md")
        for found in interval.findall(page.read_text("utf-8"))
    }
    claimed = interval.findall((ROOT / "README.md").read_text("utf-8"))
    assert len(claimed) >= 10
    assert not set(claimed) - measured, (
        f"no page of docs measures {sorted(set(claimed) - measured)}"
    )


CARDS = sorted((ROOT / "models" / "adapters").rglob("README.md"))


@pytest.mark.parametrize(
    "card", CARDS, ids=lambda card: str(card.parent.relative_to(ROOT / "models" / "adapters"))
)
def test_a_card_names_the_size_of_its_files(card: Path) -> None:
    """The first size in the row of the parameters, in MB, is that of the folder's own weights."""
    row = re.search(r"^\| parameters \|.*?(\d+\.\d) MB", card.read_text("utf-8"), re.MULTILINE)
    assert row, "no row of parameters"
    own = sum(
        file.stat().st_size for file in card.parent.glob("*.safetensors") if not file.is_symlink()
    )
    assert float(row[1]) == pytest.approx(own / 1e6, abs=0.06)


def anchors(document: Path) -> set[str]:
    """Headings as the hosting site writes them into addresses."""
    headings = re.findall(r"^#+ (.*)$", document.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_make_targets_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for code in [
        *inline(document),
        *(line for block in blocks(document) for line in block.splitlines()),
    ]:
        if found := re.match(r"\s*make ((?:[A-Z]+=\S+ )*)([a-z][a-z0-9-]*)", code):
            assert re.search(rf"^{found[2]}:", makefile, re.MULTILINE), (
                f"{document.name}: no target: `{code}`"
            )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the README assumes one: a base (tiny, with the shipped tokenizer), training and
    dev rows.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shipped = ROOT / "models" / "base-7m"
    base = tmp_path / "models" / "base-7m"
    torch.manual_seed(0)
    known = json.loads((shipped / "config.json").read_text("utf-8"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(**{**known, **sizes, **heads})).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shipped / name, base)
    rows = (ROOT / "models" / "prompts" / "sql.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]), "utf-8")
    (tmp_path / "dev.jsonl").write_text("".join(rows[8:10]), "utf-8")
    return tmp_path


def python(folder: Path, code: str, *arguments: str) -> str:
    """What a new interpreter prints that runs ``code`` in ``folder``."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


LESS = {
    "train": ["--steps", "2", "--precision", "fp32", "--threads", "1"],
    "export": ["--context", "256", "--chunk", "64"],
    "run": ["--max-tokens", "8"],
    "bench": ["--max-tokens", "8", "--rounds", "1"],
    "verify": ["--max-tokens", "8"],
}
"""What is put behind the README's own options to have its commands take seconds."""

CHAIN = """
import json, shutil
from ssdevice.cli import main
for command in json.loads(sys.argv[1]):
    print("$", *command, flush=True)
    assert main(command) == 0, command
    if command[0] == "train":  # apps beside the first
        shutil.copytree("adapters/sql", "adapters/notes")
        shutil.copytree("adapters/sql", "adapters/mail")
"""


@pytest.mark.slow  # trains, exports and measures: `.ci/run` asks for it by name
def test_the_readme_goes_from_a_model_to_an_app(place: Path) -> None:
    readme = ROOT / "README.md"
    chapter = "From a model to an app"
    chain = [command for block in blocks(readme, "sh", chapter) for command in commands_of(block)]
    assert [command[0] for command in chain[:3]] == ["train", "export", "run"]
    assert {"inspect", "bench", "verify", "bundle"} <= {command[0] for command in chain}
    said = python(
        place, CHAIN, json.dumps([[*command, *LESS.get(command[0], [])] for command in chain])
    )
    assert "All decoding modes gave the same tokens" in said
    [snippet] = blocks(readme, "python", chapter)
    answer = python(place, snippet + "\nassert 'torch' not in sys.modules")
    assert re.search(r"\d+\.\d+ \d+\.\d+$", answer.strip()), answer
