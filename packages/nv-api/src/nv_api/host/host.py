"""Host: drives one engine for a front end.

Owns when the engine steps: as long as there is work, and otherwise it waits for a frame. Never sees
text, but for the grammars, which it compiles in a thread so that no other request waits. The files
of adapters are opened in threads too.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from nv_engine.log import LOGGER
from nv_engine.pooling_params import PoolingParams

from nv_api.host.frames import (
    REFUSALS,
    Abort,
    Accepted,
    Add,
    AddAdapter,
    Answer,
    ListAdapters,
    Lost,
    Refused,
    RemoveAdapter,
    Reset,
    RowNames,
    Stats,
    Step,
    Stop,
    ToHost,
    request_of,
    with_grammar,
)
from nv_api.host.opening import Opening
from nv_api.host.wire import Wire

if TYPE_CHECKING:
    from nv_engine import (
        DrawnRow,
        Engine,
        EngineRequest,
        Grammar,
        LoRARequest,
        SequenceUpdate,
        StructuredOutputsParams,
    )
    from nv_models.adapters import AdapterFiles

IDLE_SECONDS = 1.0
"""Longest wait for a frame; then the front end gets the counters anew."""
STATS_SECONDS = 0.1
"""Between two records of the engine's counters while it works."""
DRAIN_SECONDS = 5.0
MAX_UPDATES = 256
"""In one frame: the front end's loop is free between two frames."""
NUM_COMPILERS = 2
"""Grammars compiled at once; the rest wait for their turn."""

Compile = Callable[["StructuredOutputsParams"], "Grammar"]


class Host:
    """Runs an engine until the front end stops it or is gone.

    Args:
        engine: belongs to the host, which closes it.
        wire: the connection.
        compile_grammar: makes a grammar of what a request asks for; raises as `Grammars.compile`.
    """

    def __init__(self, engine: "Engine", wire: Wire, compile_grammar: Compile) -> None:
        self._engine = engine
        self._wire = wire
        self._compile = compile_grammar
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "nv grammar")
        self._compiling: dict[int, EngineRequest] = {}
        self._compiled: SimpleQueue[tuple[int, Future[Grammar]]] = SimpleQueue()
        self._opening = Opening(engine.open_adapter, wire.ring)
        self._rows: Sequence[DrawnRow] = []
        """Of the newest frame that has a step's tokens."""
        self._stats_at = 0.0
        self._is_stopped = False

    def run(self) -> None:
        """Serve until the end."""
        try:
            while self._wire.is_open and not self._is_stopped:
                self._serve()
            self._wire.drain(DRAIN_SECONDS)
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)
            self._opening.close()
            self._wire.close()
            self._engine.close()

    def _serve(self) -> None:
        """Take in what has come, and run one step if there is work."""
        is_busy = self._engine.has_unfinished
        frames = self._wire.receive(0.0 if is_busy else IDLE_SECONDS)
        for frame in frames:
            self._take(frame)
        self._add_opened()
        self._add_compiled()
        if self._engine.has_unfinished:
            self._step()
            return
        self._rows = []  # nothing keeps the requests that have ended
        if is_busy or frames or self._is_due(IDLE_SECONDS):
            self._send_stats()

    def _take(self, frame: ToHost) -> None:
        match frame:
            case Add():
                self._add(frame)
            case Abort(request_id, index):
                if index is None:
                    self._compiling.pop(request_id, None)
                    self._opening.forget(request_id)
                self._engine.abort(request_id, index)
            case Reset():
                self._engine.reset_prefix_cache()
            case AddAdapter(request_id, lora):
                self._with_adapter(request_id, lora, lambda: self._accept(request_id))
            case RemoveAdapter(request_id, adapter_id):
                was_known = self._engine.remove_adapter(adapter_id)
                self._wire.send(Answer(request_id, was_known))
            case ListAdapters(request_id):
                self._wire.send(Answer(request_id, sorted(self._engine.adapter_ids)))
            case Stop():
                self._is_stopped = True

    def _add(self, frame: Add) -> None:
        """Queue a request, once its adapter is known."""
        request_id = frame.request_id
        try:
            request = request_of(frame)
        except REFUSALS as error:
            self._refuse(request_id, error)
            return
        if frame.lora is None:
            self._compile_and_queue(request_id, request)
        else:
            go_on = partial(self._compile_and_queue, request_id, request)
            self._with_adapter(request_id, frame.lora, go_on)

    def _with_adapter(
        self, request_id: int, lora: "LoRARequest", go_on: Callable[[], None]
    ) -> None:
        """Go on once an adapter is known; before, a thread opens its files if they are not."""
        try:
            is_known = self._engine.knows_adapter(lora)
        except REFUSALS as error:
            self._refuse(request_id, error)
            return
        if is_known:
            go_on()
        else:
            self._opening.begin(request_id, lora, go_on)

    def _add_opened(self) -> None:
        """Add the adapters whose files are open, and go on with all that waited for them."""
        for lora, opened, waiting in self._opening.ended():
            error = opened.exception()  # whatever it is: the engine has nothing of it
            if error is None:
                error = self._problem_of(lora, opened.result())
            elif not isinstance(error, REFUSALS):  # a fault of the program
                LOGGER.error("adapter %s cannot be opened", lora.lora_name, exc_info=error)
                error = RuntimeError(f"{type(error).__name__}: {error}")
            for request_id, go_on in waiting.items():
                if error is None:
                    go_on()
                else:
                    self._refuse(request_id, error)

    def _problem_of(self, lora: "LoRARequest", files: "AdapterFiles") -> BaseException | None:
        """Add an adapter; returns the reason why the engine refuses it."""
        try:
            self._engine.add_adapter(lora, files)
        except (*REFUSALS, RuntimeError) as error:
            return error
        return None

    def _compile_and_queue(self, request_id: int, request: "EngineRequest") -> None:
        """Queue a request; one with a grammar first goes to a thread that compiles it."""
        params = request.params
        form = None if isinstance(params, PoolingParams) else params.structured_outputs
        if form is None:
            self._queue(request_id, request)
            return
        self._compiling[request_id] = request
        compiled = self._compilers.submit(self._compile, form)
        compiled.add_done_callback(lambda done: self._note(request_id, done))

    def _note(self, request_id: int, compiled: "Future[Grammar]") -> None:
        """On a compiler's thread: hand the grammar to the host's own."""
        self._compiled.put((request_id, compiled))
        self._wire.ring()

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars are ready; those aborted meanwhile are forgotten."""
        while True:
            try:
                request_id, compiled = self._compiled.get_nowait()
            except Empty:
                return
            request = self._compiling.pop(request_id, None)
            if request is None or compiled.cancelled():
                continue
            if isinstance(error := compiled.exception(), REFUSALS):
                self._refuse(request_id, error)
            else:
                self._queue(request_id, with_grammar(request, compiled.result()))

    def _queue(self, request_id: int, request: "EngineRequest") -> None:
        try:
            self._engine.add(request)
        except (*REFUSALS, RuntimeError) as error:
            self._refuse(request_id, error)
        else:
            self._accept(request_id)

    def _accept(self, request_id: int) -> None:
        self._wire.send(Accepted(request_id))

    def _refuse(self, request_id: int, error: BaseException) -> None:
        self._wire.send(Refused(request_id, type(error).__name__, str(error)))

    def _step(self) -> None:
        """Step the engine and send what it gave; of a lost device, the reason."""
        output = self._engine.step_columns()
        if output.rows or output.updates or output.num_prefill_tokens:
            *parts, last = _parts(output.updates)
            for updates in parts:
                self._wire.send(Step(updates, 0, 0, is_part=True))
            counts = output.num_prefill_tokens, output.num_decode_tokens
            self._wire.send(Step(last, *counts, output.token_ids, self._named(output.rows)))
        if self._is_due(STATS_SECONDS) or not self._engine.has_unfinished:
            self._send_stats()  # after the last step too: nothing would send them for a while
        try:
            self._engine.check_usable()
        except RuntimeError as error:  # and every request has ended with the same sentence
            self._wire.send(Lost(str(error)))
            self._is_stopped = True

    def _named(self, rows: "Sequence[DrawnRow]") -> RowNames | None:
        """The names of a step's rows; None if they are those of the step before."""
        if rows == self._rows:  # of the same objects, which nothing else is equal to
            return None
        self._rows = rows
        return RowNames([row.request_id for row in rows], [row.index for row in rows])

    def _is_due(self, seconds: float) -> bool:
        return time.monotonic() - self._stats_at >= seconds

    def _send_stats(self) -> None:
        self._stats_at = time.monotonic()
        self._wire.send(Stats(self._engine.metrics))


def _parts(updates: list["SequenceUpdate"]) -> list[list["SequenceUpdate"]]:
    """A step's updates in lists of a bounded length, at least one."""
    starts = range(0, len(updates) or 1, MAX_UPDATES)
    return [updates[start : start + MAX_UPDATES] for start in starts]
