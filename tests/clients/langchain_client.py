"""langchain-openai: the standard tests of LangChain for chat models, without tools."""

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""Of the async tests: ChatOpenAI keeps its connections for the next model."""
BIASES = {1: 24.0, 92: 12.0}
"""Of a quotation mark and a closing brace: with them a random model ends its JSON."""


@pytest.fixture(autouse=True, scope="module")
def environment(served):
    """The class below makes its models without fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", served.v1)
        patch.setenv("OPENAI_API_KEY", served.key)
        yield


class TestChatOpenAI(ChatModelIntegrationTests):
    """The answers here are random, so no test depends on them."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": "tiny",
            "max_tokens": 200,
            "temperature": 0,
            "stream_usage": True,
            "use_responses_api": False,
            "logit_bias": BIASES,
        }

    @property
    def model_override_value(self):
        return "model"

    @property
    def has_tool_calling(self):
        """These tests expect certain calls with certain arguments."""
        return False

    @property
    def supports_json_mode(self):
        """This test expects certain keys, and the form leaves them to the model."""
        return False
