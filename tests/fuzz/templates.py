"""Chat formats that are hostile: templates that loop, grow or reach out, and stop tokens that do
not exist.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.json_values import NUMBERS, TEXTS

TEMPLATES = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**10**8 }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ ('x' * 9999)|replace('x', 'x' * 9999)|replace('x', 'x' * 9999) }}",
    "{{ ('x' * 9999).replace('x', 'x' * 9999).replace('x', 'x' * 9999) }}",
    "{{ 'a'|indent(10**10) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum(n=100000) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ raise_exception('no\nthanks') }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now('%' ~ 'Y' * 99999) }}",
    "{{ messages[99].content }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ 1/0 }}",
    "{{ '\ud83d' }}",
    "{{ (1,)|batch(10**9, 0)|list }}",
    "{{ range(99999)|list|string * 99 }}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "",
    " ",
    "{{ bos_token }}" * 1000,
    "x" * 100_000,
    "\0",
    "{{ messages[0].content|upper }}</s>",
)


def mutate_chat(rng: Random, document: dict[str, Any]) -> str:
    """Change the template, the frames, the stop tokens, the special tokens or the variables of a
    manifest.
    """
    chat = document["chat"]
    kinds = ["template", "stop_ids", "special_tokens", "variables", "instruction", "frames"]
    kind = rng.choices(kinds, [6, 2, 1, 1, 1, 2])[0]
    if kind == "template":
        number = rng.randrange(len(TEMPLATES))
        chat["template"] = TEMPLATES[number].encode("utf-8", "replace").decode("utf-8")
        return f"chat template {number}"
    if kind == "stop_ids":
        chat["stop_ids"] = rng.choice(
            [[], [0, 0], [rng.choice(NUMBERS)], list(range(300)), [2**31], list(range(100_000))]
        )
    elif kind == "frames":
        frame = {
            "before": rng.choice(TEXTS),
            "after": "</s>" * rng.choice([0, 1, 5000]),
            "trim": "both",
        }
        names = ("first", "system", "after_system", "user", "assistant")
        whole = {**dict.fromkeys(names, frame), "answer": rng.choice(TEXTS)}
        chat["frames"] = rng.choice(
            [None, {}, whole, {**whole, rng.choice(names): None}, {**whole, "first": []}]
        )
    elif kind == "instruction":
        document["apps"][0]["instruction"] = rng.choice(
            [*TEXTS, "{{ 1/0 }}" * 100, "x" * 65_536, "</s>" * 5000]
        )
    else:
        chat[kind] = rng.choice(
            [
                {},
                {"messages": "x"},
                {"eos_token": ""},
                {"range": "x", "raise_exception": "y"},
                {text: text for text in TEXTS},
            ]
        )
    return f"chat {kind}"
