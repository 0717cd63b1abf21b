"""openai-agents over chat completions and over responses: a typed answer, a stream, a tool."""

import asyncio
from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

QUIET = RunConfig(tracing_disabled=True)
"""Traces would go to OpenAI."""


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(served, request):
    client = AsyncOpenAI(base_url=served.v1, api_key=served.key, max_retries=0)
    return request.param(model=served.model, openai_client=client)


class Weather(BaseModel, extra="forbid"):
    sky: Literal["clear", "cloudy"]


def agent(model, **options):
    settings = ModelSettings(temperature=0.0, max_tokens=200, **options.pop("settings", {}))
    return Agent("brief", "Be brief.", model=model, model_settings=settings, **options)


def test_a_typed_answer_and_its_stream(model):
    brief = agent(model, output_type=Weather)

    async def main():
        plain = await Runner.run(brief, "How is the weather?", run_config=QUIET)
        streamed = Runner.run_streamed(brief, "How is the weather?", run_config=QUIET)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return plain, "".join(pieces), streamed.final_output

    plain, joined, final = asyncio.run(main())
    assert isinstance(plain.final_output, Weather)
    assert Weather.model_validate_json(joined) == final == plain.final_output
    assert plain.raw_responses[0].usage.output_tokens > 0


def test_a_tool_is_called_with_its_types(model):
    called = []

    @function_tool
    def paint(red: bool) -> str:
        """Paint the wall.

        Args:
            red: whether it is red.
        """
        called.append(red)
        return "done"

    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    painter = agent(model, tools=[paint], settings=settings, tool_use_behavior="stop_on_first_tool")
    result = asyncio.run(Runner.run(painter, "Paint it.", run_config=QUIET))
    assert result.final_output == "done"
    assert [type(red) for red in called] == [bool]
