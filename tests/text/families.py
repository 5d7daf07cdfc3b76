"""Chat templates as the families that users have write them, and what comes of them: frames, or a
template.
"""

from __future__ import annotations

from ssdevice.text.frames import Trim

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SMOLLM2 = """{% for message in messages %}{% if loop.first and message.role != 'system' %}{{ '<|im_start|>system
You are a small and helpful model<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else 'You are a guide.') }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a guide.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or \
(message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN3 = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\
{%- endif %}
{%- set ns = namespace(asked=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and not (message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}
        {%- set ns.found = true %}{%- set ns.asked = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer = message.content %}{%- set thoughts = '' %}
        {%- if '</think>' in answer %}
            {%- set thoughts = answer.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked %}{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}{%- endif %}
        {{- answer + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA2 = """{% set instructed = messages[0].role == 'system' %}
{% set talk = messages[1:] if instructed else messages %}
{% for message in talk %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set said = message.content %}
{% if loop.first and instructed %}
{% set said = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' + said %}
{% endif %}
{% if message.role == 'user' %}{{ bos_token + '[INST] ' + said.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + said.strip() + ' ' + eos_token }}{% endif %}
{% endfor %}"""
LLAMA3 = """{% for message in messages %}
{% set written = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + \
'<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set written = bos_token + written %}{% endif %}{{ written }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA3 = """{{ bos_token }}
{%- set before = '' %}{%- set talk = messages %}
{%- if messages[0].role == 'system' %}
    {%- set before = messages[0].content + '\\n\\n' %}{%- set talk = messages[1:] %}
{%- endif %}
{%- for message in talk %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (before if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{% endfor %}"""
MISTRAL3 = """{{- bos_token }}
{%- set told = messages[0].content if messages[0].role == 'system' else '' %}
{%- set talk = messages[1:] if told else messages %}
{%- for message in talk %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (told + '\\n\\n' if told and loop.last else '') + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""
PHI3 = """{% for message in messages %}
{% if message.role == 'system' and message.content %}{{ '<|system|>\\n' + message.content + '<|end|>\\n' }}
{%- elif message.role == 'user' %}{{ '<|user|>\\n' + message.content + '<|end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content + '<|end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{{ '<|' + message.role + '|>\\n' + message.content + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
SMOLLM3 = """{%- set mode = '/think' if enable_thinking | default(true) else '/no_think' %}
{%- set told = 'Be of use.' %}
{%- if messages[0].role == 'system' %}
    {%- set told = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() %}
    {%- if '/no_think' in messages[0].content %}{%- set mode = '/no_think' %}{%- endif %}
{%- endif %}
{{- '<|im_start|>system\\nReasoning: ' + mode + '\\n' + told + '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role != 'system' %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if mode == '/no_think' %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}"""
DATED3 = SMOLLM3.replace("'Be of use.'", "'It is ' + strftime_now('%d %B %Y') + '.'")
DISTILLED = """{{ bos_token }}{% set ns = namespace(told='') %}
{% for message in messages if message.role == 'system' %}{% set ns.told = message.content %}{% endfor %}
{{ ns.told }}{% for message in messages %}
{% if message.role == 'user' %}{{ '<|user|>' + message.content }}
{%- elif message.role == 'assistant' %}
{{ '<|assistant|>' + message.content.split('</think>')[-1] + eos_token }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""
COUNTED = (
    "{% for m in messages %}{{ loop.index ~ m.role ~ ':' ~ m.content ~ eos_token }}{% endfor %}"
)
LENGTHY = "{% for m in messages %}{{ m.role ~ (':' if m.content|length < 99 else '::') ~ m.content }}{% endfor %}"
CASED = "{% for m in messages %}{{ m.role ~ m.content|capitalize }}{% endfor %}"
LINES = "{% for m in messages %}{{ m.role ~ m.content.strip('\\n') ~ eos_token }}{% endfor %}"
FORGETFUL = "{% for m in messages[-10:] %}{{ m.role ~ m.content ~ eos_token }}{% endfor %}"
DEAF = (
    "{% for m in messages if m.role != 'system' %}{{ m.role ~ m.content ~ eos_token }}{% endfor %}"
)
CHANCE = "{{ ['a', 'b', 'c'] | random }}" + CHATML
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (messages[0].content ~ '\\n' if messages[0].role == 'system' else '') }}
    {%- for tool in tools %}{{- '<tool>' ~ tool | tojson ~ '</tool>\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' ~ message.content }}{%- endif %}
        {%- for call in message.tool_calls %}{%- set call = call.function %}
            {{- '\\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson ~ '}</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>' ~ message.content ~ '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA3_TOOLS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- set told = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' ~ date_string ~ '\\n' ~ told }}
{%- for tool in tools or [] %}{{- '\\n' ~ tool | tojson(indent=2) }}{%- endfor %}{{- '<|eot_id|>' }}
{%- for message in messages if message.role != 'system' %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ message.content | tojson ~ '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

WITH_TOOLS = {"qwen2.5": QWEN25, "hermes": HERMES, "llama3": LLAMA3_TOOLS}
"""Templates that write tools."""
WHOLE = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "gemma3": GEMMA3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "zephyr": ZEPHYR,
}
"""Templates that are texts around messages."""
MORE_NAMES = ("qwen2.5",)
"""Those of them that read tools or other arguments: they are kept beside the frames."""
ONE_QUESTION = {"qwen3": QWEN3, "distilled": DISTILLED, "counted": COUNTED, "forgetful": FORGETFUL}
"""Those that are only for a conversation of one message, because they change earlier ones."""
MORE = {
    "mistral3": MISTRAL3,
    "llama3.1": LLAMA31,
    "smollm3": SMOLLM3,
    "dated3": DATED3,
    "lengthy": LENGTHY,
    "cased": CASED,
    "lines": LINES,
    "deaf": DEAF,
    "chance": CHANCE,
}
"""Those that are none, also not for one message."""
TRIMS = {
    "llama2": (Trim.BOTH, Trim.RIGHT),
    "llama3": (Trim.BOTH,) * 2,
    "gemma": (Trim.BOTH, None),
    "gemma3": (Trim.BOTH,) * 2,
}
"""Of the user's first message and of that after a system message, where they are not NONE."""
NO_SYSTEM = ("gemma", "mistral")
"""Those that refuse a system message."""

JOINED = """{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{{- '<|assistant|>' }}
{%- for call in m.tool_calls %}{{- call.function.name + '\\n' + call.function.arguments + ';' }}{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'tool' %}{{- '<|user|>' + m.content }}
{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
WITH_TEXT_ARGUMENTS = {
    "joined": JOINED,
    "printed": JOINED.replace("+ call.function.arguments +", "~ call.function.arguments ~"),
}
"""Templates that join arguments of calls to other texts, as DeepSeek's distilled models do."""
_END = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
_EACH = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}MARK{{ m.content + '<|end|>' }}{% endfor %}"
)
_SPOKEN = _EACH + _END


def _marked(condition: str) -> str:
    return _SPOKEN.replace("MARK", "{% if " + condition + " %}{{ 'mark' }}{% endif %}")


HIDDEN = {
    "digits": _marked("m.content.isdigit()"),
    "digits, as a variable": _marked("text.isdigit()").replace(
        "{{ '<|' + m", "{% set text = m.content | trim %}{{ '<|' + m"
    ),
    "many lines": _marked("m.content.count('\\n') > 4"),
    "words": _marked("20 < m.content.split() | length < 900"),
    "upper case": _marked("m.content is upper"),
    "order": _marked("m.content > 'zzzz'"),
    "a part of a text": _marked("m.content in 'abcdefgh ijkl'"),
    "a far place": _marked("m.content[57] == 'q'"),
    "a far place by a variable": "{% set n = 57 %}" + _marked("m.content[n] == 'q'"),
    "a limit in a namespace": "{% set ns = namespace(n=57) %}" + _marked("loop.index > ns.n"),
    "a cut": _SPOKEN.replace("MARK", "").replace("m.content +", "m.content[:8000] +"),
    "a cut by %": _SPOKEN.replace("MARK", "").replace("m.content +", "'%.8000s' % m.content +"),
    "a cut by a filter": _SPOKEN.replace("MARK", "").replace(
        "m.content +", "m.content | truncate(8000) +"
    ),
    "a cut of a block": "{% filter truncate(9000) %}"
    + _SPOKEN.replace("MARK", "")
    + "{% endfilter %}",
    "a macro": "{% macro cut(t) %}{{ t[:8000] }}{% endmacro %}"
    + _SPOKEN.replace("MARK", "").replace("m.content +", "cut(m.content) +"),
    "characters": _marked("m.content | select('in', '0123456789') | list | length > 7"),
}
"""Templates that look at a content where no trial looks: they have no frames."""
PLACES = {
    "the last 43": _SPOKEN.replace("MARK", "").replace("in messages", "in messages[-43:]"),
    "after 60": _marked("loop.index0 == 60"),
    "more than 57": _marked("messages | length > 57"),
    "every 43rd": _marked("loop.index % 43 == 0"),
}
"""Templates that count messages beyond what trials have: their frames are for one question."""
