"""POST /tokenize, /detokenize; GET /tokenizer_info."""

import asyncio
import json

from fastapi import APIRouter
from starlette.requests import Request

from nv_api.conversation import Rendering
from nv_api.prompts import checked_text
from nv_api.server.body import read_body
from nv_api.server.errors import NO_ROOM, invalid, refusals
from nv_api.server.messages import check_no_template, conversation
from nv_api.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from nv_api.server.routes.described import OF_READS, body_of, errors
from nv_api.server.service import Service, service_of
from nv_api.tokenizer import Tokenizer, existing

router = APIRouter()

BYTES_PER_TOKEN = 32
"""A text may have this many bytes per token of max_model_len. English has four to five bytes per
token, so a text seven times too long for the model can still be counted."""


@router.post("/tokenize", responses=errors(), openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request) -> TokenizeResponse:
    """Token ids of a text or of a rendered conversation."""
    service = service_of(request)
    service.lifecycle.check_open()
    asked = await read_body(request, TokenizeRequest, service.options.max_body_bytes)
    service.model_of(asked.model)
    tokenizer = _tokenizer(service)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("the request needs one of prompt and messages: give one of them", "prompt")
    _check_size(asked, service.llm.facts.max_model_len)
    tokens = await (
        _of_text(asked, tokenizer) if asked.messages is None else _of_messages(asked, service)
    )
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.llm.facts.max_model_len,
        tokens=tokens,
        token_strs=list(map(tokenizer.token_text, tokens)) if asked.return_token_strs else None,
    )


@router.post("/detokenize", responses=errors(), openapi_extra=body_of(DetokenizeRequest))
async def detokenize(request: Request) -> DetokenizeResponse:
    """The text of token ids."""
    service = service_of(request)
    service.lifecycle.check_open()
    asked = await read_body(request, DetokenizeRequest, service.options.max_body_bytes)
    service.model_of(asked.model)
    tokenizer = _tokenizer(service)
    num_ids = tokenizer.num_ids
    for token_id in asked.tokens:
        if not 0 <= token_id < num_ids:
            raise invalid(
                f"tokens has {token_id}: a token id is an integer from 0 to {num_ids - 1}", "tokens"
            )
    return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, asked.tokens))


@router.get("/tokenizer_info", responses=errors(400, *OF_READS))
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """Class, template and special tokens."""
    service = service_of(request)
    service.lifecycle.check_open()
    tokenizer = _tokenizer(service)
    backend = tokenizer.backend
    template = service.options.chat_template or backend.chat_template
    special = {name: str(token) for name, token in backend.special_tokens_map.items()}
    found = {
        "tokenizer_class": type(backend).__name__,
        "chat_template": template if isinstance(template, str) else None,
        "vocab_size": tokenizer.num_ids,
    }
    return TokenizerInfo.model_validate({**special, **found})


def _check_size(asked: TokenizeRequest, max_model_len: int) -> None:
    """Refuse what would keep a thread busy for long; raises ApiError, a 400."""
    name = "prompt" if asked.messages is None else "messages"
    text = (
        asked.prompt or ""
        if asked.messages is None
        else json.dumps(asked.messages, ensure_ascii=False)
    )
    most = BYTES_PER_TOKEN * max_model_len
    if (size := len(text.encode("utf-8", "surrogatepass"))) > most:
        raise invalid(
            f"{name} has {size} bytes: at most {most} are tokenized ({BYTES_PER_TOKEN} for each of "
            f"the {max_model_len} tokens of this model's context), so send it in parts",
            name,
            NO_ROOM,
        )


async def _of_text(asked: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    text = asked.prompt or ""
    with refusals("prompt"):
        checked_text(text or " ", "prompt")
        (tokens,) = await asyncio.to_thread(
            tokenizer.encode, [text], add_special_tokens=asked.add_special_tokens is not False
        )
    return tokens


async def _of_messages(asked: TokenizeRequest, service: Service) -> list[int]:
    check_no_template(asked.chat_template)
    continues = bool(asked.continue_final_message)
    opens = asked.add_generation_prompt
    with refusals("messages"):
        rendering = Rendering(
            chat_template=service.options.chat_template,
            add_generation_prompt=not continues if opens is None else opens,
            continue_final_message=continues,
            tools=asked.tools or None,
            chat_template_kwargs=asked.chat_template_kwargs,
        )
        messages = conversation(asked.messages or [])
        return (await service.llm.chat_prompt(messages, rendering)).token_ids


def _tokenizer(service: Service) -> Tokenizer:
    with refusals():
        return existing(service.llm.text)
