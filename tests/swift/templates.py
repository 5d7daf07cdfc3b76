"""Chat templates, and the prompts that Python renders with them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from ssdevice.errors import ConfigError
from ssdevice.text.chat_template import ChatFormat, ChatTemplate
from tests.runtime.scripted import TEMPLATE
from tests.text.test_tokenizer import TEMPLATES, TEXTS

BASE_7M = Path(__file__).resolve().parents[2] / "models" / "base-7m" / "chat_template.jinja"
SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '!' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
QWEN = """{%- if tools %}
    {{- tools | tojson }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and \
not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>' }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
WRITTEN = {"ours": TEMPLATE, "smollm2": SMOLLM2, "llama": LLAMA, "qwen": QWEN, "gemma": GEMMA, **TEMPLATES}
UNKNOWN = ("turns",)
"""Templates with something that hosts without jinja2 need not know."""
NAMES: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False, "numbers": [3, 1, 2]}
EXPRESSIONS = """
1 + 2 * 3 - 4 // 3; (1 + 2) * 3; 7 % 3; -numbers[-1] + 1; numbers | length; numbers[1]; numbers[5]
numbers[0:2] | length; numbers[1:] | length; numbers[:-1] | length; numbers[::-1][0]; numbers[-2:][0]
'abc' | length; 'a' ~ 1 ~ none ~ true; 'a' if true else 'b'; 'a' if false; 'a' if 0 else 'b' if '' else 'c'
not true and false; not (true and false); true or raise_exception('no'); false and raise_exception('no'); 1 == 1
1 != 1; 'a' == 'a' and 'a' != 'b'; 'é' == 'e\u0301'; 1 < 2; 2 <= 1; 2 > 1; 1 >= 1; 'b' in 'abc'; 'd' in 'abc'
3 in numbers; 4 not in numbers; 'x' in {'x': 1}; nobody is defined; nobody is undefined; nobody is not defined
none is none; 1 is none; 'a' is string; numbers is string; true is true; false is false; 1 is true; nobody or 'x'
nobody; nobody == 1; none == none; none; nobody | default('d'); bos_token | default('d'); '  a b \n' | trim
' a '.strip(); 'xxaxx'.strip('x'); 'xxaxx'.lstrip('x'); 'xxaxx'.rstrip('x'); 'abc'.startswith('ab')
'abc'.endswith('ab'); 'a,b,,c'.split(',') | length; 'a,b'.split(',')[1]; 'abc'.split('x')[0]; namespace(a=1).a
namespace(a=1).b is defined; ['a', 'b'][1]; [] or 'empty'; messages[0].role; messages[0]['content']
messages[0].nothing is defined; '\u2003a\u00a0' | trim; "it's" ~ 'a "word"'; 'a\\nb\\\\c'; ('a')
'a' + 'b' | trim + 'c'; numbers | sum; 'a' | upper; range(3) | length; 1.5; {'a': 1}.a; 'a' * 3; 'abc'[1:]
cycler(1); 1 < 2 < 3; 'a' 'b'
"""
PIECES = ("a", " ", "\n", " \n ", "\t", "\r\n", "\r", "{{ 'x' }}", "{{- 'y' }}", "{{ '\\n' -}}", "{# c #}", "{#- c -#}")
SIGNS = ("", "", "-", "+")


def record() -> dict[str, Any]:
    """Every template with several conversations, expressions, and white space around tags in random ways."""
    cases = []
    for name, template in {**WRITTEN, "base-7m": BASE_7M.read_text("utf-8")}.items():
        for messages in _conversations():
            cases.append(_case(template, messages, known=name not in UNKNOWN))
    for expression in EXPRESSIONS.strip().replace("\n", "; ").split("; "):
        cases.append(_case("{{ " + expression + " }}", _conversations()[0], known=None))
    rng = Random(0)
    cases += [_case(_spaced(rng, 3), _conversations()[0], known=True) for _ in range(600)]
    return {"cases": cases}


def _conversations() -> list[list[dict[str, str]]]:
    said = [*TEXTS, "<think>\nwhy\n</think>\n\nso", ""]
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    system = {"role": "system", "content": "Be brief."}
    return [turns[:1], turns[:3], turns[2:], turns[:2], turns, [system, *turns[:3]], [turns[0]] * 2, [system]]


def _case(template: str, messages: list[dict[str, str]], *, known: bool | None) -> dict[str, Any]:
    """``known``: whether hosts must know what the template has; None if they may refuse it."""
    text = None
    with suppress(ConfigError):
        text = ChatTemplate(ChatFormat(template, {}, (), NAMES)).render(messages, add_generation_prompt=True)
    return {"template": template, "messages": messages, "known": known, "text": text}


def _spaced(rng: Random, depth: int) -> str:
    """Text, outputs, comments, conditions and loops, with any signs and white space."""

    def tag(inside: str) -> str:
        return f"{{%{rng.choice(SIGNS)} {inside} {rng.choice(SIGNS)}%}}"

    found = []
    for _ in range(rng.randint(1, 6)):
        kind = rng.randrange(6) if depth else 0
        body = _spaced(rng, depth - 1) if kind > 2 else ""
        if kind == 3:
            found.append(tag("if numbers") + body + tag("else") + "no" + tag("endif"))
        elif kind == 4:
            found.append(tag("for n in numbers if n != 1") + body + "{{ loop.index0 ~ n }}" + tag("endfor"))
        elif kind == 5:
            found.append(tag("set x = 'set'") + body + "{{ x }}")
        else:
            found.append(rng.choice(PIECES))
    return "".join(found)
