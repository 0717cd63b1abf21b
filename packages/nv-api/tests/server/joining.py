"""The answer that the chunks of a stream make, and the same of a plain answer."""

import re

from nv_api.server.protocol.chat import ChatChunk, ChatResponse


def joined_chat(chunks):
    """The choices that a stream of chat chunks amounts to."""
    choices = {}
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        for part in chunk["choices"]:
            choice = choices.get(part["index"])
            if choice is None:
                assert part["delta"]["role"] == "assistant"
                choice = choices[part["index"]] = {
                    "content": None, "thoughts": None, "calls": [], "logprobs": [], "ids": [],
                }  # fmt: skip
            _add(choice, part["delta"])
            choice["ids"] += part.get("token_ids", [])
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            assert "finish_reason" not in choice, "it ends once"
            if part["finish_reason"]:
                assert part["delta"] == {}
                choice |= {k: part[k] for k in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


def _add(choice, delta):
    """Add a delta to a choice."""
    assert delta.get("reasoning") == delta.get("reasoning_content")
    for name, key in ("content", "content"), ("reasoning", "thoughts"):
        if delta.get(name) is not None:
            choice[key] = (choice[key] or "") + delta[name]
    for call in delta.get("tool_calls", []):
        function = call["function"]
        if call["index"] == len(choice["calls"]):
            assert re.fullmatch("call_[A-Za-z0-9]{24}", call["id"])
            assert call["type"] == "function"
            choice["calls"].append({"name": function["name"], "arguments": ""})
        else:
            assert call.keys() == {"index", "function"}
            assert function.keys() == {"arguments"}
            assert call["index"] == len(choice["calls"]) - 1
        choice["calls"][call["index"]]["arguments"] += function["arguments"]


def plain_chat(body):
    """The choices of a plain answer."""
    ChatResponse.model_validate(body)
    return [
        {
            "content": choice["message"]["content"],
            "thoughts": _thoughts(choice["message"]),
            "calls": [call["function"] for call in choice["message"].get("tool_calls", [])],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "ids": choice.get("token_ids", []),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in body["choices"]
    ]


def _thoughts(message):
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning")
