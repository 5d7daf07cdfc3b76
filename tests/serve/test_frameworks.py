"""Frameworks of agents against a server whose model would say anything but a call.

They are not among the packages of the project: each test needs its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel  # openai's client needs it

from ssdevice.serve.names import LOOPBACK
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.sampling.letters import letters
from tests.serve.serving import served, tiny_session

pytestmark = pytest.mark.wide
SHORT = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}"
    "{{ '<' + m.role + '>' + (m.content or '')[:9] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that leaves room for an answer in the tiny model's context."""
APP = "letters"


class Person(BaseModel):
    """A person."""

    sex: Literal["f", "m"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_session() as session:
        chat = ChatFormat(SHORT, {"eos_token": "</s>"}, (0,))
        session.tokenizer = ChatTokenizer(letters().tokenizer, chat)
        with served(session) as (port, _):
            yield f"http://{LOOPBACK}:{port}/v1"


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    model: Any = langchain.ChatOpenAI(model=APP, base_url=url, api_key="none", max_retries=0)
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Person, method=method).invoke("Ada")
        assert isinstance(found, Person)
    for choice in ("any", "Person"):
        bound = model.bind_tools([Person], tool_choice=choice)
        (call,) = bound.invoke("Ada").tool_calls
        assert call["name"] == "Person" and Person(**call["args"])
        pieces = list(bound.stream("Ada"))
        whole = sum(pieces[1:], pieces[0])
        assert [each["name"] for each in whole.tool_calls] == ["Person"]


def test_instructor(url: str) -> None:
    instructor = pytest.importorskip("instructor", reason="needs instructor")
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        asked = instructor.from_openai(client, mode=mode).chat.completions
        found = asked.create(
            model=APP, response_model=Person, messages=[{"role": "user", "content": "Ada"}]
        )
        assert isinstance(found, Person)


def test_pydantic_ai(url: str) -> None:
    agents = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key="none")
    model = OpenAIChatModel(APP, provider=provider)
    for form in (agents.ToolOutput(Person), agents.NativeOutput(Person)):
        agent = agents.Agent(model, output_type=form)
        assert isinstance(agent.run_sync("Ada").output, Person)
