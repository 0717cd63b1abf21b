"""instructor: a typed answer through response_format."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel, extra="forbid"):
    sky: Literal["clear", "cloudy"]


def test_a_typed_answer(served):
    with openai.OpenAI(base_url=served.v1, api_key=served.key) as client:
        weather = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        found = weather.chat.completions.create(
            model=served.model,
            response_model=Weather,
            messages=[{"role": "user", "content": "How is the weather?"}],
            max_tokens=200,
            max_retries=0,
        )
    assert isinstance(found, Weather)
