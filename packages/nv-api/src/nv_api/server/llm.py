"""ServedLLM: what a server needs of a model that runs elsewhere; `nv_api.AsyncLLM` has it.

Owns the protocol alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nv_engine import EngineMetrics, LoRARequest, ModelFacts, PoolingParams, SamplingParams
from nv_models import PoolerConfig

from nv_api.conversation import Rendering
from nv_api.prompts import PromptLike, TokenPrompt
from nv_api.request import Request
from nv_api.request_stream import TakeDeltas
from nv_api.tokenizer import Tokenizer


class ServedStream(Protocol):
    """One prompt in flight."""

    @property
    def request(self) -> Request:
        """The request as far as the engine has computed it."""

    async def hand_on(self, take: TakeDeltas) -> None:
        """Call `take` with what is new, of each completion that has news, until all have ended."""

    def abort(self) -> None:
        """End it; a finished one is left as it is."""


class ServedLLM(Protocol):
    """A model, from the moment that its load begins."""

    on_step: Callable[[Any], None]
    """Called with each step of the engine; it has `num_prefill_tokens` and `num_decode_tokens`."""

    @property
    def is_ready(self) -> bool:
        """The model is loaded."""

    @property
    def loss(self) -> str | None:
        """The reason why nothing runs any more."""

    @property
    def text(self) -> Tokenizer | None:
        """None: only token ids go in and come out."""

    @property
    def facts(self) -> ModelFacts:
        """Known once the model is loaded."""

    @property
    def num_slots(self) -> int:
        """Sequences that run at once, known once the model is loaded."""

    @property
    def pooler(self) -> PoolerConfig | None:
        """How prompts are pooled, known once the model is loaded; None: it generates text."""

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the checkpoint's recommendation."""

    @property
    def stats(self) -> EngineMetrics:
        """The engine's newest counters."""

    async def ready(self) -> None:
        """Wait until the model is loaded; raises what the load raised."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter's files and begin to read them.

        Raises:
            ValueError, FileNotFoundError: the engine refuses it.
            RuntimeError: the engine is lost.
        """

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; raises RuntimeError if the engine is lost."""

    async def submit(
        self, prompt: TokenPrompt, params: SamplingParams | PoolingParams
    ) -> ServedStream:
        """Return once the engine has accepted the request.

        Raises:
            ValueError, NotImplementedError, ImportError: the engine refuses it.
            RuntimeError: the engine is lost.
        """

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering,
        *,
        truncates: bool = False,
    ) -> TokenPrompt:
        """Render a conversation; raises PromptTooLong unless it will be truncated."""

    async def tokenize(
        self,
        prompts: Sequence[PromptLike],
        *,
        add_special_tokens: bool = True,
        truncates: bool = False,
    ) -> list[TokenPrompt]:
        """The token ids of each prompt; raises PromptTooLong unless they will be truncated."""
