"""pydantic-ai: text, a stream, a typed answer."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel, extra="forbid"):
    sky: Literal["clear", "cloudy"]


@pytest.fixture
def model(served):
    provider = OpenAIProvider(base_url=served.v1, api_key=served.key)
    settings = {"temperature": 0.0, "max_tokens": 200}
    return OpenAIChatModel(served.model, provider=provider, settings=settings)


def test_text_and_its_stream(model):
    agent = Agent(model, instructions="Be brief.")
    plain = agent.run_sync("Say ab.")

    async def streamed():
        async with agent.run_stream("Say ab.") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert plain.output
    assert plain.usage.output_tokens > 0
    assert asyncio.run(streamed()) == plain.output


def test_a_typed_answer(model):
    agent = Agent(model, output_type=NativeOutput(Weather))
    assert isinstance(agent.run_sync("How is the weather?").output, Weather)
