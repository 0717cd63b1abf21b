"""Head: what the runner asks of the part of a step that comes after the model.

Owns the protocols of a head, of its work in one batch, and of the result. Never runs a step.

The model turns tokens into hidden states; a head turns hidden states into what the batch is run
for. The runner knows no more of it than is written here.
"""

from collections.abc import Hashable, Sequence
from typing import Protocol, TypeAlias

import nv_kernels as nk
from torch import Tensor

from nv_engine.batch import Batch, StepResult
from nv_engine.device.inputs import Layout, StepInputs

Outputs: TypeAlias = tuple[Tensor, ...]
"""Results of a head's device work in one step. Number and shapes follow from the layout of the
step and the key of the work."""


class HeadResult(Protocol):
    """A batch's results on their way to the host."""

    @property
    def is_ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> StepResult:
        """Wait for the batch and read what the head made.

        Raises:
            RuntimeError: a step failed on the device.
        """
        ...


class HeadWork(Protocol):
    """The part of a head in the steps of one batch."""

    @property
    def key(self) -> Hashable:
        """All that `compute` depends on besides its arguments and the head's tables.

        Steps of the same layout and key are replayed from the same graph.
        """
        ...

    @property
    def is_capturable(self) -> bool:
        """False if the batch must run eagerly: `finish` needs its hidden states, for example."""
        ...

    def compute(
        self,
        hidden_TE: Tensor,
        rows: nk.StepRows,
        step: StepInputs,
        layout: Layout,
        lora: nk.LoraPlan | None = None,
    ) -> Outputs:
        """Queue the head's part of one step: device work on fixed shapes, nothing read back.

        Rows of the padding slot and tokens of no row are among its arguments; what they give must
        change no other row.

        Args:
            hidden_TE: hidden states of the step's tokens.
            rows: what the device has read of the rows: positions, lengths, each row's last token.
            step: what the host has sent of them: slots, and slots that drawn tokens belong to.
            layout: the shapes.
            lora: the adapters of the tokens, if one of them changes the ends of the model.
        """
        ...

    def finish(
        self,
        row_numbers: Sequence[int],
        outputs: Outputs,
        hidden_TE: Tensor | None = None,
        lora: nk.LoraPlan | None = None,
    ) -> HeadResult:
        """Queue what is left to do once every step of the batch is queued. Called once.

        Args:
            row_numbers: the row of each chunk.
            outputs: what `compute` returned, [num_steps, ...] each.
            hidden_TE: hidden states of the last step; None if it was replayed from a graph.
            lora: as `compute` got it, of that step.
        """
        ...


class Head(Protocol):
    """Keeps what the sequences in the slots ask for, and does its part of each batch."""

    def update(self, batch: Batch) -> bool:
        """Take in what the batch brings, before its first step.

        Returns:
            True if a tensor that `compute` reads has moved in memory, so that graphs are stale.
        """
        ...

    def work(self, batch: Batch) -> HeadWork:
        """The work of a batch that was taken in."""
        ...

    def expect_idle_step(self) -> None:
        """Count a step whose outputs are not read: the one that runs before a capture."""
        ...

    def resync(self) -> None:
        """Find out which steps the device has run, after a batch that broke off.

        It may wait for the device.
        """
        ...
