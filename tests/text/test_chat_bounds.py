"""Templates that loop or grow are refused, and those of models are left as they were."""

from __future__ import annotations

from time import perf_counter

import pytest

from ssdevice.errors import ConfigError
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from tests.fuzz.templates import TEMPLATES

USER = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(ChatFormat(source, {"bos_token": "<s>"}, (0,))).render(USER, add_generation_prompt=True)


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_hostile_template_ends(source: str) -> None:
    clock = perf_counter()
    try:
        text = render(source.encode("utf-8", "replace").decode("utf-8"))
    except ConfigError as error:
        assert str(error)
    else:
        assert len(text) <= 1 << 23
    assert perf_counter() - clock < 60  # far from what it takes, and far from forever


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
