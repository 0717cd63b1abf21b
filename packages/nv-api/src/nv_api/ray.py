"""NvPredictor: prompts of a Ray Data set in, texts out, one engine an actor.

Owns how a batch of rows becomes requests and how results become columns. Never places anything: how
many actors there are, and with how many cards each, is what `map_batches` is told.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

from nv_engine import SamplingParams, StructuredOutputsParams

from nv_api.conversation import Rendering, conversation_list
from nv_api.llm import LLM
from nv_api.outputs import CompletionOutput
from nv_api.processor import Request
from nv_api.prompts import TokenPrompt, single_prompt, tokenize

try:
    import numpy as np
    import ray.data  # noqa: F401  # nothing of it is needed to predict, but for Ray to call this
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'nv_api.ray needs Ray Data: pip install "nv-api[ray]"', name=error.name
    ) from error

Row: TypeAlias = Mapping[str, Any]
PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
FIELDS = {field.name: field.type for field in fields(SamplingParams)}


class Prediction(NamedTuple):
    """What becomes of a row; the names are those of the columns."""

    generated_text: str | None
    generated_token_ids: list[int] | None
    finish_reason: str
    """ "stop" or "length"; "error" where the row is no request."""
    error: str | None = None
    """Why the row is no request."""


class NvPredictor:
    """Completes the prompts of batches: `ds.map_batches(NvPredictor, ...)`.

    A row has a column "prompt" (text), "prompt_token_ids" or "messages" (a conversation), and may
    have "sampling_params": a dict of the fields of `SamplingParams` that differ for this row (null
    stands for "as the others"). It keeps its columns and gains those of `Prediction`. Rows keep
    their number and, within a batch, their order; between batches Ray keeps it if
    `ray.data.DataContext` asks for `execution_options.preserve_order`.

    A row that cannot be run (no prompt, too long, parameters out of range) says so in its columns
    and stops nobody else. If the device fails, the engine is started again, once, for what it lost.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Load the model; all arguments go into `fn_constructor_kwargs`.

        Args:
            model: as in `LLM`; a folder must be at the same path on every node.
            sampling_params: for rows without their own; None: the checkpoint's recommendation.
            chat_template_kwargs: more for the chat template, such as `{"enable_thinking": False}`.
            **options: as in `LLM`.

        Raises:
            ValueError: `sampling_params` is out of range or asks for several completions a row;
                and as `LLM` does.
        """
        self._model, self._options = model, options
        self._rendering = Rendering(chat_template_kwargs=chat_template_kwargs)
        self._llm = self._start()
        recommended = self._llm.get_default_sampling_params()
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = _changed(recommended, sampling_params or {})
        self._params = _single(sampling_params)

    def __call__(self, batch: dict[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Complete a batch: columns in, the same columns and those of `Prediction` out.

        Raises:
            ValueError: no column holds prompts.
            TypeError: the batch is no dict of columns.
            RuntimeError: the device failed again after a new start.
        """
        if not isinstance(batch, dict):
            raise TypeError(
                f"the batch is a {type(batch).__name__}: leave batch_format at its default"
            )
        if not batch.keys() & set(PROMPT_COLUMNS):
            raise ValueError(
                f"the columns are {', '.join(batch)}: one must be {' or '.join(PROMPT_COLUMNS)}"
            )
        names = [name for name in (*PROMPT_COLUMNS, "sampling_params") if name in batch]
        columns = [batch[name] for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        predictions = self.predict(rows)
        return batch | {
            name: _column([getattr(prediction, name) for prediction in predictions])
            for name in Prediction._fields
        }

    def predict(self, rows: Sequence[Row]) -> list[Prediction]:
        """Complete rows, in their order.

        Raises:
            RuntimeError: the device failed again after a new start.
        """
        found = dict(enumerate(self._attempt(rows)))
        lost = [index for index, each in found.items() if _was_lost(each)]
        if lost:
            self._llm.close()
            self._llm = self._start()
            found |= zip(lost, self._attempt([rows[index] for index in lost]), strict=True)
        predictions = []
        for each in found.values():
            if isinstance(each, CompletionOutput):
                if _was_lost(each):
                    raise RuntimeError(f"the device failed twice: {each.stop_reason}")
                reason = each.finish_reason or "abort"
                predictions.append(Prediction(each.text, list(each.token_ids), reason))
            else:
                predictions.append(Prediction(None, None, "error", str(each)))
        return predictions

    def _start(self) -> LLM:
        return LLM(self._model, **self._options)

    def _attempt(self, rows: Sequence[Row]) -> list[CompletionOutput | Exception]:
        """Each row's completion, or why it is no request."""
        session = self._llm._session
        added: list[Request | Exception] = []
        for row in rows:
            try:
                added.append(session.add(self._prompt(row), self._params_of(row)))
            except (ValueError, TypeError, NotImplementedError) as error:
                added.append(error)
        try:
            while not self._llm.is_finished():
                session.step()
        except BaseException:
            for each in added:
                if isinstance(each, Request):
                    session.abort(each.request_id)
            raise
        return [e.output().outputs[0] if isinstance(e, Request) else e for e in added]

    def _prompt(self, row: Row) -> TokenPrompt:
        given = {name: _plain(row[name]) for name in PROMPT_COLUMNS if name in row}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"the row has {len(given)} prompts: give one")
        if "messages" in given:
            (conversation,) = conversation_list([given["messages"]])
            return self._llm._chat_prompt(conversation, self._rendering)
        (prompt,) = tokenize([single_prompt(given)], self._llm._text)
        return prompt

    def _params_of(self, row: Row) -> SamplingParams:
        own = row.get("sampling_params")
        if own is None:
            return self._params
        if not isinstance(own, Mapping):
            raise ValueError(f"sampling_params is {own!r}: it must be a dict")
        return _single(_changed(self._params, own))


def _was_lost(found: CompletionOutput | Exception) -> bool:
    """True for a completion that ended because the device failed."""
    return isinstance(found, CompletionOutput) and found.finish_reason == "error"


def _single(params: SamplingParams) -> SamplingParams:
    if params.n != 1:
        raise ValueError(f"n is {params.n}: a row stays one row, so it must be 1")
    return params


def _changed(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """The parameters with some fields set."""
    given = {name: _plain(value) for name, value in changes.items()}
    given = {name: _field(name, value) for name, value in given.items() if value is not None}
    return replace(params, **given)


def _field(name: str, value: Any) -> Any:  # noqa: ANN401
    """A field's value as it was before it went through columns, which know fewer types."""
    if name not in FIELDS:
        raise ValueError(f"sampling_params has an unknown field {name!r}")
    if isinstance(value, float) and value.is_integer() and "float" not in str(FIELDS[name]):
        return int(value)
    if name == "logit_bias":
        return {int(token): bias for token, bias in value.items() if bias is not None}
    if name == "structured_outputs" and isinstance(value, Mapping):
        return StructuredOutputsParams(**{k: v for k, v in value.items() if v is not None})
    return value


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A cell without NumPy; a missing one is None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _column(values: list[Any]) -> "np.ndarray":
    """A column of cells that may be None or lists."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column
