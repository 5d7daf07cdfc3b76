"""Whatever a template does, it ends within the limits of its process; those of models are left as
they were.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest

from ssdevice.cli import one_line
from ssdevice.errors import ConfigError
from ssdevice.text import chat_template
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from ssdevice.text.renderer import Renderer
from tests.fuzz.templates import TEMPLATES

USER = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FULL = "the chat template (refuses|cannot be used|takes|broke).*(memory|0.3 s of processor time|exit code|characters)"
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "powers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x ** 64 %}{% endfor %}",
    "equal": "{% set ns = namespace(l=[1], m=[1]) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% set ns.m = [ns.m, ns.m] %}{% endfor %}{{ ns.l == ns.m }}",
}
LARGE = {
    "join": "{{ ''.join(['a' * 8000000] * 200) | length }}",
    "join filter": "{{ (['a' * 8000000] * 200) | join | length }}",
    "tilde": "{{ (messages[0].content ~ (['a' * 8000000] * 200)) | length }}",
    "output": "{% set x = 'a' * 8000000 %}{% for i in range(200) %}{{ x }}{% endfor %}",
    "format": "{{ ('{0:9999}' * 160000).format(messages | length) | length }}",
    "percent": "{{ (('%(a)9999s' * 160000) % {'a': messages | length}) | length }}",
    "translate": "{{ ('a' * 1600000).translate({97: 'b' * 1000}) | length }}",
    "kept": "{% set ns = namespace(l=[]) %}{% for i in range(200) %}"
    "{% set ns.l = ns.l + [('a' * 8000000) ~ i] %}{% endfor %}",
    "block": "{% set x %}{% for i in range(200) %}{{ 'a' * 8000000 }}{% endfor %}{% endset %}{{ x | length }}",
    "macro": "{% macro m() %}{% for i in range(200) %}{{ 'a' * 8000000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "prompt": "{{ 'ab' * 5000000 }}",
}
DEEP = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "minus": "{{ " + "-" * 20000 + "1 }}",
    "if": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "for": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "lists": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "sum": "{{ " + "+".join(["1"] * 20000) + " }}",
    "members": "{{ a" + ".b" * 20000 + " }}",
    "recursion": "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
}


@pytest.fixture(autouse=True, scope="module")
def renderer() -> Iterator[Renderer]:
    """One process for all, so that a test shows what the one before left."""
    made = Renderer(seconds=0.3, memory=1 << 27)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "Renderer", lambda: made)
        patch.setattr(chat_template.weakref, "finalize", lambda *_: SimpleNamespace())
        yield made
    made.close()


def render(source: str) -> str:
    return ChatTemplate(ChatFormat(source, {"bos_token": "<s>"}, (0,))).render(
        USER, add_generation_prompt=True
    )


@pytest.mark.parametrize("source", [*ENDLESS.values(), *LARGE.values()], ids=[*ENDLESS, *LARGE])
def test_what_takes_too_much_is_one_error_and_the_next_prompt_is_rendered(source: str) -> None:
    with pytest.raises(ConfigError, match=FULL) as caught:
        render(source)
    assert one_line(str(caught.value)) == str(caught.value)
    assert render(PLAIN) == "<user>hi"


@pytest.mark.parametrize("source", DEEP.values(), ids=DEEP)
def test_what_is_nested_too_deeply_is_one_error(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(source)
    assert one_line(str(caught.value)) == str(caught.value)
    assert render(PLAIN) == "<user>hi"


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_hostile_template_ends(source: str) -> None:
    try:
        text = render(source.encode("utf-8", "replace").decode("utf-8"))
    except ConfigError as error:
        assert str(error)
    else:
        assert len(text) <= 1 << 23


def test_a_process_that_was_ended_or_interrupted_is_replaced(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(ChatFormat(PLAIN, {}, (0,)))
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    assert template.render(USER, add_generation_prompt=True) == "<user>hi"

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ssdevice.text.renderer._exchange", interrupted)
        template.render(
            [{"role": "user", "content": "an answer that nobody reads"}], add_generation_prompt=True
        )
    assert template.render(USER, add_generation_prompt=True) == "<user>hi"


AT_EXIT = """
import threading, time
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
template = ChatTemplate(ChatFormat("{% for i in range(99999) %}{% endfor %}", {}, (0,)))
def ask():
    while True:
        template.render([], add_generation_prompt=True)
threading.Thread(target=ask, daemon=True).start()
time.sleep(0.1)
"""


def test_a_thread_that_renders_when_python_ends_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKED = """
import os, signal, sys, threading, time
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
count = "range(messages[0].content | int)"
template = "{% for i in COUNT %}{% for j in COUNT %}{% endfor %}{% endfor %}done".replace("COUNT", count)
template = ChatTemplate(ChatFormat(template, {}, (0,)))
def render(count):
    return template.render([{"role": "user", "content": str(count)}], add_generation_prompt=True)
thread = threading.Thread(target=render, args=(3000,))  # a third of a second, which a busy machine does not miss
thread.start()
while thread.is_alive() and not template._renderer._lock.locked():
    time.sleep(0.001)
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(render(1) != "done")
thread.join()
sys.exit(os.waitpid(child, 0)[1] or render(1) != "done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_that_was_forked_during_a_request_renders_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", None)])
def test_an_app_without_an_interpreter_refuses_templates(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    renderer.close()
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(ConfigError, match="an interpreter of Python, which this app does not have"):
        render(PLAIN)


def test_without_a_limit_of_processor_time_the_wait_has_an_end(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer.close()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = subprocess.Popen
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "wait", 0.5)
        patch.setattr(subprocess, "Popen", lambda command, **options: started(sleeper, **options))
        with pytest.raises(ConfigError, match=r"takes more than the 0\.5 s"):
            render(PLAIN)
    assert render(PLAIN) == "<user>hi"


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs a process that can be stopped")
def test_time_in_which_the_process_does_not_run_counts_for_nothing(renderer: Renderer) -> None:
    template = ChatTemplate(ChatFormat(PLAIN, {}, (0,)))
    assert renderer._process is not None and renderer.wait == math.inf
    renderer._process.send_signal(signal.SIGSTOP)
    later = Timer(2 * renderer.seconds, renderer._process.send_signal, [signal.SIGCONT])
    later.start()
    assert template.render(USER, add_generation_prompt=True) == "<user>hi"
    later.join()


def test_the_process_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert render(PLAIN) == "<user>hi"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}", "user: hi\n"),
        ("{{ bos_token + messages[0]['content'] * 3 }}", "<s>hihihi"),
        ("{{ '%s-%03d' % ('a', 7) }}|{{ '%5.2f'|format(1.5) }}", "a-007| 1.50"),
        ("{% macro m(x) %}<{{ x ~ 1 }}>{% endmacro %}{{ m('a') }}{{ m('b') }}", "<a1><b1>"),
        ("{{ ['a', 'b']|join(', ') }}{{ '-'.join(['c', 'd']) }}", "a, bc-d"),
        ("{{ 'aXb'.replace('X', '--')|replace('b', 'c') }}{{ 2 ** 10 }}", "a--c1024"),
        ("{% for i in range(1000) %}{% if i == 999 %}{{ i }}{% endif %}{% endfor %}", "999"),
        (
            "{% for a in 'xy' %}{% for b in 'uv' %}{{ loop.index }}{{ b }}{% endfor %}{% else %}-{% endfor %}",
            "1u2v1u2v",
        ),
        ("{{ messages|tojson(indent=1)|length }}{{ ' a b '.strip().split(' ')|length }}", "452"),
    ],
)
def test_what_templates_do_is_left_as_it_was(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_fits() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 500}] * 1000
    text = ChatTemplate(ChatFormat(source, {}, (0,))).render(messages, add_generation_prompt=True)
    assert len(text) == 1000 * (6 + 2500)
