"""NvPredictor and NvPooler: prompts of a Ray Data set in, texts or results out.

There is one engine per actor.

Owns how a batch of rows becomes requests and how results become columns. Never places actors: the
arguments of `map_batches` decide how many there are, and how many cards each has.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias

from nv_engine import PoolingParams, SamplingParams, StructuredOutputsParams

from nv_api.conversation import Rendering, chat_prompt, conversation_list
from nv_api.pooled_request import PooledRequest
from nv_api.pooling import existing_pooler, with_task
from nv_api.pooling_prompts import truncated, with_prompt
from nv_api.prompts import Prompt, TokenPrompt, single_prompt, tokenize
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
    """ "stop" or "length"; "error" if the row cannot be run, or not to its end."""
    error: str | None = None
    """The reason of an "error"; None otherwise."""


class NvPredictor:
    """Completes the prompts of batches: `ds.map_batches(NvPredictor, ...)`.

    A row has a column "prompt" (text), "prompt_token_ids" or "messages" (a conversation), and may
    have "sampling_params": a dict of the fields of `SamplingParams` that differ for this row (null
    means "as the others"). It keeps its columns and gains those of `Prediction`. The number of rows
    and, within a batch, their order stay the same; between batches Ray keeps the order if
    `ray.data.DataContext` has `execution_options.preserve_order`.

    A row that cannot be run (no prompt, too long, parameters out of range), or that fails alone
    (NaN in its logits), has the reason in its column "error"; the other rows run. If the device
    fails, a new engine runs the rows that were lost; if that fails too, an error is raised.
    """

    own_params = "sampling_params"
    """The column of parameters."""
    columns: tuple[str, ...] = tuple(Prediction.__annotations__)
    """The new columns."""

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
        names = [name for name in (*PROMPT_COLUMNS, self.own_params) if name in batch]
        columns = [batch[name] for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        predictions = self.predict(rows)
        return batch | {
            name: _column([getattr(prediction, name) for prediction in predictions])
            for name in self.columns
        }

    def predict(self, rows: Sequence[Row]) -> list[Prediction]:
        """Complete rows, in their order.

        Raises:
            RuntimeError: the device failed again after a new start.
        """
        predictions = []
        for each in self._run(rows):
            if isinstance(each, Request):
                output = each.output().outputs[0]
                reason = output.finish_reason or "abort"
                error = str(output.stop_reason) if reason == "error" else None
                predictions.append(Prediction(output.text, list(output.token_ids), reason, error))
            else:
                predictions.append(Prediction(None, None, "error", str(each)))
        return predictions

    def _start(self) -> Started:
        return start(self._model, self._options)

    def _run(self, rows: Sequence[Row]) -> list[Request | Exception]:
        """Each row's request, or the error of a row that cannot be run.

        Rows that a failed device has lost run once more, on a new engine.

        Raises:
            RuntimeError: the device failed again.
        """
        found = dict(enumerate(self._attempt(rows)))
        if lost := self._lost(found):
            self._started.session.close()
            self._started = self._start()
            again = dict(zip(lost, self._attempt([rows[index] for index in lost]), strict=True))
            if twice := self._lost(again):
                (completion,) = twice[min(twice)].completions
                raise RuntimeError(f"the device failed twice: {completion.stop_reason}")
            found |= again
        return list(found.values())

    def _lost(self, found: Mapping[int, Request | Exception]) -> dict[int, Request]:
        """Requests that ended with "error", if a step of this engine failed.

        Without a failed step the error is of the row itself, as NaN in its logits.
        """
        if not self._started.session.num_failed_steps:
            return {}
        return {
            index: each
            for index, each in found.items()
            if isinstance(each, Request) and each.completions[0].finish_reason == "error"
        }

    def _add(self, row: Row) -> list[Request]:
        """Queue the request of a row."""
        return self._started.session.add([self._prompt(row)], [self._params_of(row)])

    def _attempt(self, rows: Sequence[Row]) -> list[Request | Exception]:
        """Each row's request, which has ended, or the error of a row that cannot be run."""
        session = self._started.session
        added: list[Request | Exception] = []
        for row in rows:
            try:
                added += self._add(row)
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
        return added

    def _prompt(self, row: Row) -> TokenPrompt:
        given = {name: _plain(row[name]) for name in PROMPT_COLUMNS if name in row}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"the row has {len(given)} prompts: give one")
        if "messages" in given:
            (conversation,) = conversation_list([given["messages"]])
            return chat_prompt(self._started.tokenizer, conversation, self._rendering)
        (prompt,) = tokenize([self._named(single_prompt(given))], self._started.tokenizer)
        return prompt

    def _named(self, prompt: Prompt) -> Prompt:
        """The prompt with what goes in front of its text."""
        return prompt

    def _params_of(self, row: Row) -> SamplingParams:
        own = _mapping("sampling_params", row.get("sampling_params"))
        return _single(_changed(self._params, own)) if own else self._params


class Pooled(NamedTuple):
    """The result of a row that is pooled; its fields are the new columns."""

    pooled: list[float] | list[list[float]] | None
    """An embedding or class values; of a task of tokens one list per token."""
    error: str | None = None
    """Why the row has no result; None if it has one."""


class NvPooler(NvPredictor):
    """Pools the prompts of batches: `ds.map_batches(NvPooler, ...)`.

    Columns and errors are as of `NvPredictor`; in place of "sampling_params" a row may have
    "pooling_params": a dict of the fields of `PoolingParams` that differ for this row. A row gains
    the columns of `Pooled`.
    """

    own_params = "pooling_params"
    columns = tuple(Pooled.__annotations__)

    def __init__(
        self,
        model: str,
        *,
        pooling_task: str | None = None,
        pooling_params: PoolingParams | Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Load the model; all arguments go into `fn_constructor_kwargs`.

        Args:
            model: as in `LLM`; a folder must be at the same path on every node.
            pooling_task: as of `LLM.encode`.
            pooling_params: for rows without their own.
            prompt_name: as of `LLM.encode`.
            **options: as in `LLM`.

        Raises:
            ValueError: the model generates text, or has another task; and as `LLM` does.
        """
        self._model, self._options = model, options
        self._rendering = Rendering()
        self._started = self._start()
        self._pooler = existing_pooler(self._started.pooler)
        if not isinstance(pooling_params, PoolingParams):
            pooling_params = PoolingParams(**(pooling_params or {}))
        (self._pooling,) = with_task(pooling_params, pooling_task, 1, self._pooler)
        with_prompt([], self._pooler, prompt_name)  # raises if the name is unknown
        self._prompt_name = prompt_name

    def predict(self, rows: Sequence[Row]) -> list[Pooled]:  # type: ignore[override]  # its rows
        """Pool rows, in their order."""
        return [_pooled(each) for each in self._run(rows)]

    def _add(self, row: Row) -> list[Request]:
        own = _mapping("pooling_params", row.get("pooling_params"))
        own = vars(PoolingParams(**{name: _count(value) for name, value in own.items()}))
        changes = {name: value for name, value in own.items() if value is not None}
        params = replace(self._pooling, **changes)
        session = self._started.session
        kept = truncated([self._prompt(row)], [params], session.max_model_len)
        return [*session.add_pooled(kept, [params])]

    def _named(self, prompt: Prompt) -> Prompt:
        (named,) = with_prompt([prompt], self._pooler, self._prompt_name)
        return named


def _count(value: Any) -> Any:  # noqa: ANN401
    """A number of a column's as an int where it is whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _pooled(found: Request | Exception) -> Pooled:
    if not isinstance(found, PooledRequest):
        return Pooled(None, str(found))
    if found.values.error is not None:
        return Pooled(None, found.values.error)
    return Pooled(found.values.tensor().tolist())


def _mapping(name: str, given: object) -> dict[str, Any]:
    """A row's own parameters, plain."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is {given!r}: it must be a dict")
    return {key: _plain(value) for key, value in given.items()}


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
