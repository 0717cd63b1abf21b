"""The shapes of /page/defaults."""

from nv_api.server.protocol.fields import Given


class ChatDefaults(Given):
    """Values of a chat's fields that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    max_tokens: None = None
    """The rest of the context."""
    seed: int | None
    stop: list[str]


class PageDefaults(Given):
    """The values that the page shows at first."""

    models: list[str]
    """Names of the model, the one that is used where a request has none first."""
    max_model_len: int
    """Most tokens of prompt and completion."""
    max_logprobs: int
    """Most likely tokens beside each, at most."""
    tasks: list[str]
    """Of a model that pools; none: it generates text, and the page is a chat."""
    routes: list[str]
    """For those tasks."""
    defaults: ChatDefaults
