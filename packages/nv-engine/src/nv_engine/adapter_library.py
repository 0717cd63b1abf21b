"""AdapterLibrary: the adapters that requests have named, by id.

Owns which version of an adapter an id means now, the checks of its files, and the thread that reads
them. Never holds a tensor: each rank reads its own slices.
"""

import threading
from pathlib import Path
from queue import SimpleQueue

from nv_models.adapters import AdapterFiles, resolve_adapter

from nv_engine.adapter import Adapter, AdapterSource
from nv_engine.facts import AdapterFacts
from nv_engine.lora_request import LoRARequest


class _Known:
    """An id's newest version."""

    __slots__ = ("adapter", "files", "request")

    def __init__(self, request: LoRARequest, adapter: Adapter, files: AdapterFiles) -> None:
        self.request, self.adapter, self.files = request, adapter, files


class AdapterLibrary:
    """Adapters by id.

    Args:
        facts: of the model; None: it was loaded without adapters.
    """

    def __init__(self, facts: AdapterFacts | None) -> None:
        self._facts = facts
        self._known: dict[int, _Known] = {}
        self._next_key = 0
        self._unread: SimpleQueue[_Known | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_read = threading.Event()

    @property
    def ids(self) -> set[int]:
        """Ids that mean an adapter now."""
        return set(self._known)

    def find(self, request: LoRARequest, files: AdapterFiles | None = None) -> Adapter:
        """The version that a request means; its files are checked, and read from now on.

        Args:
            request: the adapter.
            files: of `open`; None: they are opened here, if the version is not known.

        Raises:
            ValueError: adapters are not enabled, the id means another adapter, or the files do not
                fit the model.
            FileNotFoundError: the adapter's files do not exist.
        """
        return self.known(request) or self._add(request, files or self.open(request))

    def known(self, request: LoRARequest) -> Adapter | None:
        """The version that a request means; None: files have to be opened for it.

        Raises:
            ValueError: adapters are not enabled, or the id means another adapter.
        """
        self._facts_for(request)
        known = self._known.get(request.lora_int_id)
        if known is not None and known.adapter.failure is None:
            if Path(request.lora_path) == Path(known.request.lora_path):
                if not request.load_inplace or known.files.is_unchanged():
                    return known.adapter
            elif not request.load_inplace:
                raise ValueError(
                    f"lora_int_id {request.lora_int_id} is {known.request.lora_name!r} from "
                    f"{known.request.lora_path} already: give {request.lora_name!r} from "
                    f"{request.lora_path} another id, or load_inplace=True to replace it"
                )
        return None

    def open(self, request: LoRARequest) -> AdapterFiles:
        """An adapter's files as they are now, checked; any thread may call it.

        Raises:
            ValueError: adapters are not enabled, or the files do not fit the model.
            FileNotFoundError: the adapter's files do not exist.
        """
        facts = self._facts_for(request)
        try:
            files = AdapterFiles.open(resolve_adapter(request.lora_path))
        except FileNotFoundError:
            raise
        except OSError as error:
            place, why = error.filename or request.lora_path, error.strerror or error
            raise ValueError(f"{place} cannot be read ({why}): let this user read it") from error
        files.matrices(facts.targets, facts.max_rank)
        return files

    def _facts_for(self, request: LoRARequest) -> AdapterFacts:
        """The facts, if adapters are enabled."""
        if self._facts is None:
            raise ValueError(
                f"lora_request is {request.lora_name!r} and the model was loaded without adapters: "
                "load it with enable_lora=True"
            )
        return self._facts

    def _add(self, request: LoRARequest, files: AdapterFiles) -> Adapter:
        """Make a request's id mean these files, which a thread reads from now on."""
        folder, self._next_key = str(Path(files.folder).absolute()), self._next_key + 1
        source = AdapterSource(self._next_key, request.lora_name, folder, files.signature)
        known = _Known(request, Adapter(source), files)
        # an interrupt at any place leaves no id that waits for a thread which does not run
        self._unread.put(known)
        if self._thread is None:
            thread = threading.Thread(target=self._read, name="nv_engine adapters", daemon=True)
            thread.start()
            self._thread = thread
        self._known[request.lora_int_id] = known
        return known.adapter

    def forget(self, adapter_id: int) -> bool:
        """Let an id mean nothing; requests that have its adapter keep it."""
        return self._known.pop(adapter_id, None) is not None

    def wait(self, seconds: float) -> None:
        """Wait until files are read, or for so long."""
        self._has_read.wait(seconds)
        self._has_read.clear()

    def close(self) -> None:
        """End the thread."""
        self._unread.put(None)

    def _read(self) -> None:
        """Read whole files, one after the other: they are in the page cache then."""
        while (known := self._unread.get()) is not None:
            try:
                digest = known.files.digest()
                if known.files.is_unchanged():
                    known.adapter.digest = digest
                else:
                    known.adapter.failure = (
                        f"{known.files.folder} has changed while it was read: ask again"
                    )
            except (OSError, MemoryError) as error:
                known.adapter.failure = f"{known.files.folder} cannot be read: {error}"
            self._has_read.set()
