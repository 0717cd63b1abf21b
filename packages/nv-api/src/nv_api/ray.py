"""NvPredictor: prompts of a Ray Data set in, texts out, one engine per actor.

Owns how a batch of rows becomes requests and how results become columns. Never places actors: the
arguments of `map_batches` decide how many there are, and how many cards each has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

from nv_engine import SamplingParams, StructuredOutputsParams

from nv_api.conversation import Rendering, chat_prompt, conversation_list
from nv_api.outputs import CompletionOutput
from nv_api.prompts import TokenPrompt, single_prompt, tokenize
from nv_api.request import Request
from nv_api.start import Started, start

try:
    import numpy as np
    import ray.data  # noqa: F401  # not used here, but Ray Data needs it to call this
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'nv_api.ray needs Ray Data: pip install "nv-api[ray]"', name=error.name
    ) from error

Row: TypeAlias = Mapping[str, Any]
PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
FIELDS = {field.name: field.type for field in fields(SamplingParams)}


class Prediction(NamedTuple):
    """The result of a row; its fields are the new columns."""

    generated_text: str | None
    generated_token_ids: list[int] | None
    finish_reason: str
    """ "stop" or "length"; "error" if the row cannot be run."""
    error: str | None = None
    """Why the row cannot be run; None if it was run."""


class NvPredictor:
    """Completes the prompts of batches: `ds.map_batches(NvPredictor, ...)`.

    A row has a column "prompt" (text), "prompt_token_ids" or "messages" (a conversation), and may
    have "sampling_params": a dict of the fields of `SamplingParams` that differ for this row (null
    means "as the others"). It keeps its columns and gains those of `Prediction`. The number of rows
    and, within a batch, their order stay the same; between batches Ray keeps the order if
    `ray.data.DataContext` has `execution_options.preserve_order`.

    A row that cannot be run (no prompt, too long, parameters out of range) has the reason in its
    column "error"; the other rows run. If the device fails, a new engine runs the rows that were
    lost; if that fails too, an error is raised.
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
            chat_template_kwargs: more variables for the chat template, such as
                `{"enable_thinking": False}`.
            **options: as in `LLM`.

        Raises:
            ValueError: `sampling_params` is out of range or asks for several completions per row;
                and as `LLM` does.
        """
        self._model, self._options = model, options
        self._rendering = Rendering(chat_template_kwargs=chat_template_kwargs)
        self._started = self._start()
        if not isinstance(sampling_params, SamplingParams):
            sampling_params = _changed(self._started.default_params, sampling_params or {})
        self._params = _single(sampling_params)

    def __call__(self, batch: dict[str, "np.ndarray"]) -> dict[str, "np.ndarray"]:
        """Complete a batch: columns in, the same columns and those of `Prediction` out.

        Raises:
            ValueError: no column holds prompts.
            TypeError: the batch is not a dict of columns.
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
            for name in Prediction.__annotations__
        }

    def predict(self, rows: Sequence[Row]) -> list[Prediction]:
        """Complete rows, in their order.

        Raises:
            RuntimeError: the device failed again after a new start.
        """
        found = dict(enumerate(self._attempt(rows)))
        lost = [index for index, each in found.items() if _was_lost(each)]
        if lost:
            self._started.session.close()
            self._started = self._start()
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

    def _start(self) -> Started:
        return start(self._model, self._options)

    def _attempt(self, rows: Sequence[Row]) -> list[CompletionOutput | Exception]:
        """Each row's completion, or the error of a row that cannot be run."""
        session = self._started.session
        added: list[Request | Exception] = []
        for row in rows:
            try:
                added += session.add([self._prompt(row)], [self._params_of(row)])
            except (ValueError, TypeError, NotImplementedError) as error:
                added.append(error)
        try:
            while not session.finished:
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
            return chat_prompt(self._started.tokenizer, conversation, self._rendering)
        (prompt,) = tokenize([single_prompt(given)], self._started.tokenizer)
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
    """A field's value with the type it had before it became a column's."""
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
