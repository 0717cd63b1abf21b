"""Speeches: the parsers of one completion of a chat.

Owns which parsers a request needs. The chat template names them.
"""

from nv_api.prompts import TokenPrompt
from nv_api.said import Function, Speech, ToolCalls, reasoning_parser, tool_call_parser
from nv_api.server.protocol.chat import ChatRequest
from nv_api.server.service import Service


def new_speech(asked: ChatRequest, service: Service, prompt: TokenPrompt) -> Speech:
    """A reader of one completion of a rendered prompt."""
    tokenizer = service.llm.text
    found = None if tokenizer is None else tokenizer.backend.chat_template
    template = found if isinstance(found, str) else None
    thoughts = reasoning_parser(None, template)
    dialect = tool_call_parser(None, template)
    tools = asked.tools if asked.tool_choice != "none" else None
    functions = [_function(tool["function"]) for tool in tools or []]
    return Speech(
        None if thoughts is None else thoughts(thoughts.place_after(prompt.text or "")),
        ToolCalls(dialect, functions) if dialect is not None and functions else None,
    )


def _function(described: dict[str, object]) -> Function:
    parameters = described.get("parameters")
    return Function(str(described["name"]), parameters if isinstance(parameters, dict) else None)
