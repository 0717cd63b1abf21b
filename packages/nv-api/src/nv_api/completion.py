"""Completion: one completion as it grows, tokens on one side and text on the other.

Owns its tokens, its text, their log-probabilities and how it ended; never talks to the engine.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nv_api.answer_stops import AnswerStops
from nv_api.detokenizer import Detokenizer
from nv_api.logprobs import LogprobColumns, TokenText
from nv_api.outputs import CompletionOutput
from nv_api.said import Place
from nv_api.stopping import StopSearch, StopStrings

if TYPE_CHECKING:
    from nv_engine import SamplingParams, TokenLogprobs


class Begun(NamedTuple):
    """The state of a completion when an update began."""

    num_tokens: int
    num_read: int
    num_pieces: int
    stopping: object
    decoding: object


class Completion:
    """One completion of a request; `extend` it with each step's tokens.

    An update starts with `begin` and counts once `begun` is set to None. If an exception comes
    between the two, the next `begin` undoes the update.

    Text is made when it is read (`text`, `delta`, the end), or as tokens come if there are stop
    strings to find. Text that was returned is never changed: the deltas joined are the final text.

    Args:
        index: which of the request's completions this is.
        params: the request's parameters.
        detokenizer: None where no text is wanted.
        token_text: texts of tokens with log-probabilities; None where no text is wanted.
        place: where the text begins, if stop strings are searched after its thought only.
    """

    def __init__(
        self,
        index: int,
        params: "SamplingParams",
        detokenizer: Detokenizer | None,
        token_text: TokenText | None = None,
        place: Place | None = None,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._logprobs = None if params.logprobs is None else LogprobColumns()
        self._detokenizer = detokenizer
        self._token_text = token_text
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stops = _stop_search(params, place)
        self.is_plain = self._stops is None and self._logprobs is None
        """Its tokens have nothing beside them, and their text is made when it is read."""
        self.begun: Begun | None = None
        """Where the update that does not count yet began; None if there is none."""
        self._pieces: list[str] = []
        # How far the text goes. Pieces, detokenizer and stop strings may be ahead of these four if
        # a read was interrupted; then `_is_ahead`.
        self._num_read = 0  # tokens whose text is in the pieces
        self._num_pieces = 0
        self._stopping = None if self._stops is None else self._stops.state
        self._decoding = None if detokenizer is None else detokenizer.state
        self._is_ahead = False
        self._num_hidden = 0  # tokens at the end that have no text: 1 for a stop token
        self._given = (0, 0)  # pieces and tokens that earlier deltas held

    @property
    def finished(self) -> bool:
        """True once no update can follow."""
        return self.finish_reason is not None and self.begun is None

    @property
    def has_news(self) -> bool:
        """Whether a delta has a token that none had before, or the end."""
        return len(self.token_ids) > self._given[1] or self.finished

    @property
    def text(self) -> str:
        """The text so far, without bytes that may become a character or a stop string."""
        self._read_all()
        return "".join(self._pieces)

    def extend(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence["TokenLogprobs"] | None = None,
    ) -> bool:
        """Add a step's tokens; end if the engine ended it or a stop string is complete.

        Args:
            token_ids: the new tokens; those after the one that completes a stop string are dropped.
            finish_reason: the engine's; None while it continues.
            stop_reason: the stop token, or the error's sentence.
            logprobs: the engine's, one for each token; None unless asked for.

        Returns:
            True if the completion ended.
        """
        self.token_ids.extend(token_ids)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs)
        if finish_reason == "stop" and not self._include_stop:
            self._num_hidden = 1
        if self._stops is not None and self._find_stop():
            return True
        if finish_reason is None:
            return False
        self.finish(finish_reason, stop_reason)
        return True

    def finish(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End here; text that was held back is released."""
        self._read_all()
        self._resume()
        self._is_ahead = True
        stop = self._flush()
        if stop is not None and finish_reason == "length":
            finish_reason, stop_reason = "stop", stop
        self._num_pieces = len(self._pieces)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def abort(self) -> None:
        """End with "abort"; an update that does not count yet is undone."""
        self._undo()
        self.begun = None
        self.finish("abort")

    def delta(self) -> CompletionOutput:
        """The news since the last call: an output whose text, ids and logprobs are the rest."""
        num_tokens, pieces = len(self.token_ids), self._pieces
        self._read(num_tokens - self._num_hidden)
        num_given, first = self._given
        num_pieces = len(pieces)
        self._given = num_pieces, num_tokens
        text = pieces[-1] if num_pieces - num_given == 1 else "".join(pieces[num_given:])
        return self._output(text, first)

    def output(self) -> CompletionOutput:
        """The completion as users see it: a snapshot, final once it has finished."""
        return self._output(self.text, 0)

    def _output(self, text: str, first: int) -> CompletionOutput:
        """A text, and the tokens from `first` on."""
        columns = self._logprobs
        return CompletionOutput.of(
            {
                "index": self.index,
                "text": text,
                "token_ids": self.token_ids[first:],
                "cumulative_logprob": None if columns is None else columns.cumulative(),
                "_logprobs": None if columns is None else columns.reader(self._token_text, first),
                "finish_reason": self.finish_reason,
                "stop_reason": self.stop_reason,
            }
        )

    def begin(self) -> None:
        """Begin an update; if the last one was interrupted, undo it first."""
        if self.begun is None:
            self.begun = Begun(
                len(self.token_ids),
                self._num_read,
                self._num_pieces,
                self._stopping,
                self._decoding,
            )
        else:
            self._undo()

    def _undo(self) -> None:
        """Undo an update that does not count yet."""
        if self.begun is None:
            return
        del self.token_ids[self.begun.num_tokens :]
        if self._logprobs is not None:
            self._logprobs.truncate(self.begun.num_tokens)
        self._is_ahead = True
        _, self._num_read, self._num_pieces, self._stopping, self._decoding = self.begun
        self._num_hidden = 0
        self.finish_reason = self.stop_reason = None

    def _find_stop(self) -> bool:
        """Read token by token; True if a stop string ended the completion."""
        num_readable = len(self.token_ids) - self._num_hidden
        for position in range(self._num_read + 1, num_readable + 1):
            stop = self._read(position)
            if stop is not None:
                del self.token_ids[position:]
                if self._logprobs is not None:
                    self._logprobs.truncate(position)
                self._num_hidden = 0
                self.finish_reason, self.stop_reason = "stop", stop
                return True
        return False

    def _read_all(self) -> None:
        """Make the text of every token that has one."""
        self._read(len(self.token_ids) - self._num_hidden)

    def _read(self, position: int) -> str | None:
        """Make the text of the tokens before `position`; return the stop string it completes."""
        detokenizer = self._detokenizer
        if detokenizer is None or position == self._num_read:
            return None
        if self._is_ahead:
            self._resume()
        self._is_ahead = True
        piece = detokenizer.push(self.token_ids[self._num_read : position])
        stop = stopping = None
        if self._stops is None:  # `_show` without a call: this is done for every token
            self._pieces.append(piece)
        else:
            stop, stopping = self._show(piece, position), self._stops.state
        num_pieces, decoding = len(self._pieces), detokenizer.state
        # One statement without a call: an interrupt finds all of it done, or nothing.
        self._num_read, self._num_pieces, self._stopping, self._decoding, self._is_ahead = (
            position,
            num_pieces,
            stopping,
            decoding,
            False,
        )
        return stop

    def _resume(self) -> None:
        """Go back to the last consistent text, if a read was interrupted."""
        del self._pieces[self._num_pieces :]
        if self._detokenizer is not None:
            self._detokenizer.state = self._decoding
        if self._stops is not None:
            self._stops.state = self._stopping

    def _flush(self) -> str | None:
        """Make text of incomplete bytes and release what was held back; return its stop string."""
        if self._detokenizer is None:
            return None
        stop = self._show(self._detokenizer.flush(), self._num_read)
        if self._stops is not None and stop is None:
            piece, stop = self._stops.flush(armed=self._num_read > self._min_tokens)
            self._pieces.append(piece)
        return stop

    def _show(self, piece: str, num_read: int) -> str | None:
        """Add a piece of text, except what the stop strings hold back."""
        stop = None
        if self._stops is not None:
            piece, stop = self._stops.push(piece, armed=num_read > self._min_tokens)
        self._pieces.append(piece)
        return stop


def _stop_search(params: "SamplingParams", place: Place | None) -> StopSearch | None:
    """The search for a request's stop strings; None if it has none."""
    if not params.stop_strings:
        return None
    stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
    return stops if place is None else AnswerStops(place, stops)
