"""PooledInputJob: a request to pool texts, token ids or one conversation.

Owns what `input` and `messages` mean. What is made of the results is its kinds'.
"""

import asyncio
from typing import Any

from nv_api.conversation import Rendering
from nv_api.pooling_prompts import with_prompt
from nv_api.prompts import Prompt, TokenPrompt
from nv_api.server.errors import invalid, refusals
from nv_api.server.inputs import input_list, tokenized
from nv_api.server.jobs.pooled import PooledJob
from nv_api.server.messages import check_no_template, check_rendered, conversation
from nv_api.server.protocol.pooled import PooledInput
from nv_api.server.service import Service
from nv_api.tokenizer import existing


class PooledInputJob(PooledJob):
    """Prompts to pool, each alone; arguments and errors as of `PooledJob`."""

    def __init__(
        self,
        asked: PooledInput,
        task: str,
        service: Service,
        name: str,
        **more: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(asked, task, service, name, **more)
        if (asked.input is None) == (asked.messages is None):
            raise invalid("the request needs one of input and messages: give one of them", "input")
        self._asked = asked
        self._prompts: list[Prompt] = []
        if asked.messages is None:
            with refusals("prompt_name"):
                given = input_list(asked.input, "input")
                self._prompts = with_prompt(given, service.pooler, asked.prompt_name)
        else:
            self.field = "messages"
            self._messages = conversation(asked.messages)
            self._rendering = _rendering(asked, service)
        self.num_sequences = max(1, len(self._prompts))

    async def prompts(self) -> list[TokenPrompt]:
        """The prompts, tokenized."""
        asked, llm = self._asked, self._service.llm
        if asked.messages is not None:
            return self.kept([await self._of_messages()])
        with refusals("input"):
            made = await tokenized(
                llm,
                self._prompts,
                add_special_tokens=asked.add_special_tokens is not False,
                truncates=self.truncates,
            )
        return self.kept(made)

    async def _of_messages(self) -> TokenPrompt:
        """The rendered conversation."""
        llm = self._service.llm
        with refusals("messages"):
            prompt = await llm.chat_prompt(
                self._messages, self._rendering, truncates=self.truncates
            )
            check_rendered(self._messages, prompt)
            if self._asked.add_special_tokens:
                encode = existing(llm.text).encode
                (ids,) = await asyncio.to_thread(encode, [prompt.text or ""])
                prompt = prompt._replace(token_ids=ids)
        return prompt


def _rendering(asked: PooledInput, service: Service) -> Rendering:
    """How a conversation becomes a prompt, which nothing has to continue.

    Raises:
        ApiError: 400, the fields contradict each other.
    """
    check_no_template(asked.chat_template)
    with refusals("continue_final_message"):
        return Rendering(
            chat_template=service.options.chat_template,
            add_generation_prompt=bool(asked.add_generation_prompt),
            continue_final_message=bool(asked.continue_final_message),
            chat_template_kwargs=asked.chat_template_kwargs,
        )
