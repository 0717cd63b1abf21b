"""Said: a completion's text as thoughts, content and calls of functions.

Owns the parsers, which read a text forward in pieces of any size, and the grammars that force a
form on it. Never sees a token id, a request or a connection.
"""

from nv_api.said.events import Arguments, CallBegun, CallEnded, Content, Event, Thought
from nv_api.said.functions import Function
from nv_api.said.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser,
    tool_call_parser,
)
from nv_api.said.scope import Place, ThoughtScope
from nv_api.said.speech import Speech
from nv_api.said.tool_calls import ToolCalls

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "Arguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Event",
    "Function",
    "Place",
    "Speech",
    "Thought",
    "ThoughtScope",
    "ToolCalls",
    "reasoning_parser",
    "tool_call_parser",
]
