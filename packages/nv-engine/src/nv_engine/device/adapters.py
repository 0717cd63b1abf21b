"""Adapters of one rank: which slot's sequence has which, and their way from files to the card.

Owns the row of each slot that names its adapter, the images on the host, and the thread that fills
them. Never decides which adapter is where: the scheduler does.
"""

import enum
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue

import nv_kernels as nk
import torch
from nv_models.adapters import AdapterFiles, AdapterImage, AdapterPool
from torch import Tensor

from nv_engine.batch import NO_ADAPTER, AdapterFetch, AdapterLoad, Batch, Chunk, StepResult
from nv_engine.device.head import HeadResult
from nv_engine.device.inputs import Layout, StepInputs
from nv_engine.device.upload import upload
from nv_engine.log import LOGGER


class AdapterUse(enum.Enum):
    """The part of a step that the adapters of its rows change; it is in a graph's key."""

    NONE = enum.auto()
    LAYERS = enum.auto()
    ENDS = enum.auto()
    """The embedding, the head or a classifier's own too."""


class _Image:
    """A slot's values on the host."""

    def __init__(self, values: AdapterImage) -> None:
        self.values = values
        self.copied: torch.cuda.Event | None = None
        """Of the last load: until then the values must stay."""


class _Job:
    """The fetch of one adapter."""

    def __init__(self, fetch: AdapterFetch, image: _Image) -> None:
        self.fetch, self.image = fetch, image
        self.ended = threading.Event()
        self.has_ends = False
        self.failure: str | None = None


class AdapterTables:
    """The adapters of the sequences in the slots.

    Args:
        pool: of the model.
        num_slots: of sequences; one more is for padding rows.
        num_images: adapters to keep on the host.
        is_batch_invariant: a token's bits must not depend on the other tokens.
        is_first: whether this is rank 0, whose reports the scheduler reads.
        with_ends: slots of the pool that are taken to change the ends, for trial steps.
    """

    def __init__(
        self,
        pool: AdapterPool,
        num_slots: int,
        num_images: int,
        *,
        is_batch_invariant: bool = False,
        is_first: bool = True,
        with_ends: Sequence[int] = (),
    ) -> None:
        self._pool = pool
        self._is_batch_invariant, self._is_first = is_batch_invariant, is_first
        self._device = pool.values.device
        self.adapters = torch.full(  # of each slot
            (num_slots + 1,), NO_ADAPTER, dtype=torch.int32, device=self._device
        )
        self._of_slot = [NO_ADAPTER] * (num_slots + 1)
        self._with_ends = set(with_ends)
        self._failed: dict[int, str] = {}  # by slot of the pool
        # Pinned memory is made now: it takes the driver long, and steps would wait.
        self._images = [_Image(pool.image()) for _ in range(num_images)]
        self._jobs: dict[int, _Job] = {}  # by image
        self._unread: SimpleQueue[_Job | None] = SimpleQueue()
        self._read: SimpleQueue[_Job] = SimpleQueue()
        self._num_unreported = 0
        self._thread: threading.Thread | None = None

    def update(self, batch: Batch) -> None:
        """Take in what a batch fetches, loads and admits."""
        for fetch in batch.fetches:
            self._fetch(fetch)
        for load in batch.loads:
            self._load(load)
        if not batch.admissions:
            return
        for admission in batch.admissions:
            self._of_slot[admission.slot] = admission.adapter
        rows = upload([each.slot for each in batch.admissions], torch.int64, self._device)
        values = [each.adapter for each in batch.admissions]
        self.adapters[rows] = upload(values, torch.int32, self._device)

    def use(self, chunks: Sequence[Chunk]) -> AdapterUse:
        """The part of a step that the adapters of its rows change."""
        found = {self._of_slot[chunk.slot] for chunk in chunks} - {NO_ADAPTER}
        if not found:
            return AdapterUse.NONE
        return AdapterUse.LAYERS if found.isdisjoint(self._with_ends) else AdapterUse.ENDS

    def plan(self, step: StepInputs, query_start: Tensor, layout: Layout) -> nk.LoraPlan:
        """The adapter of each token of a step; device work on fixed shapes, nothing read back."""
        adapters_T = self.adapters[step.slots_S]
        if not layout.only_single_tokens:
            ends_S = query_start[1:].contiguous()
            tokens_T = torch.arange(layout.num_tokens, dtype=ends_S.dtype, device=self._device)
            row_T = torch.searchsorted(ends_S, tokens_T, right=True)
            none_1 = adapters_T.new_full((1,), NO_ADAPTER)  # of tokens of no row
            adapters_T = torch.cat([adapters_T, none_1])[row_T]
        is_invariant = self._is_batch_invariant
        tile = nk.lora_tile(layout.num_tokens, self._device.type, is_batch_invariant=is_invariant)
        return nk.lora_plan(adapters_T, self._pool.num_slots, tile, is_invariant)

    def reported(self, batch: Batch, result: HeadResult) -> HeadResult:
        """A batch's result, with the adapters that were read or failed since the last one."""
        failed = {
            chunk.slot: self._failed[adapter]
            for chunk in batch.chunks
            if self._failed and (adapter := self._of_slot[chunk.slot]) in self._failed
        }
        if not failed and not self._num_unreported:
            return result
        return _Reported(self, result, failed)

    def news(self) -> tuple[list[int], dict[int, str]]:
        """Keys of adapters that are whole on the host, and why others are not, since last asked."""
        fetched: list[int] = []
        failures: dict[int, str] = {}
        while not self._read.empty():
            job = self._read.get()
            self._num_unreported -= 1
            if job.failure is None:
                fetched.append(job.fetch.source.key)
            else:
                failures[job.fetch.source.key] = job.failure
        return fetched, failures

    def _fetch(self, fetch: AdapterFetch) -> None:
        if self._thread is None:
            jobs = self._pool, self._unread, self._read
            thread = threading.Thread(
                target=_fill_images, args=jobs, name="nv_engine adapter images", daemon=True
            )
            thread.start()
            self._thread = thread  # an interrupt before leaves none that does not run
            # The thread does not hold the tables: when these go, it ends and frees the pool.
            weakref.finalize(self, self._unread.put, None).atexit = False
        self._jobs[fetch.image] = job = _Job(fetch, self._images[fetch.image])
        self._num_unreported += 1
        self._unread.put(job)

    def _load(self, load: AdapterLoad) -> None:
        """Copy an image to its slot; wait until it is whole."""
        job = self._jobs[load.image]
        assert job.fetch.source.key == load.key, "an image was fetched anew before its load"
        job.ended.wait()
        self._with_ends.discard(load.slot)
        self._failed.pop(load.slot, None)
        if job.failure is not None:
            if not self._is_first:
                raise RuntimeError(f"{job.failure} (rank 0 may have read it)")
            self._failed[load.slot] = job.failure
            self._pool.clear(load.slot)
            return
        if job.has_ends:
            self._with_ends.add(load.slot)
        self._pool.load(load.slot, job.image.values)
        if self._device.type == "cuda":
            job.image.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            job.image.copied.record()


@torch.inference_mode()
def _fill_images(
    pool: AdapterPool, unread: "SimpleQueue[_Job | None]", read: "SimpleQueue[_Job]"
) -> None:
    """Fill images, in the order of their jobs; None ends it."""
    while (job := unread.get()) is not None:
        source, image = job.fetch.source, job.image
        try:
            if image.copied is not None:
                image.copied.synchronize()
            files = AdapterFiles.open(Path(source.folder))
            if files.signature != source.signature:
                raise OSError(
                    "its files have changed since the adapter was added: pass load_inplace=True"
                )
            job.has_ends = pool.fill(image.values, files)
        except (OSError, ValueError) as error:
            job.failure = f"adapter {source.name}: {error}"
        except BaseException as error:  # a fault of the program: the next job is still filled
            LOGGER.error("adapter %s cannot be read", source.name, exc_info=error)
            job.failure = f"adapter {source.name}: {type(error).__name__}: {error}"
        read.put(job)
        job.ended.set()


class _Reported:
    """A result and news of adapters."""

    def __init__(
        self, tables: AdapterTables, result: HeadResult, failed: Mapping[int, str]
    ) -> None:
        self._tables, self._result, self._failed = tables, result, failed

    @property
    def is_ready(self) -> bool:
        """Whether the batch has ended."""
        return self._result.is_ready

    def result(self) -> StepResult:
        """Wait for the batch."""
        result = self._result.result()
        fetched, unfetched = self._tables.news()
        failed = {**(result.failed or {}), **self._failed}
        return result._replace(fetched=fetched, unfetched=unfetched, failed=failed or None)
