"""Which way each batch size takes on each device: in place, streamed, or split. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from offload.decode import SMALL_BATCH
from offload.schedule.splitter import Splitter, stay
from offload.times.min_batch import MinBatch


@dataclass(frozen=True)
class Ways:
    """The way of each batch size.

    `min_batch` are the thresholds for all devices together, and `min_batches` those of each device,
    if they differ. A batch whose layers are split is computed so whatever its thresholds are.
    """

    min_batch: MinBatch
    min_batches: tuple[MinBatch, ...] = ()
    may_split: bool = False  # False while other ways are measured
    unsplit: frozenset[int] = frozenset()  # sizes of small batches that are not split
    splitter: Splitter = stay
    splitters: Mapping[int, Splitter] = field(default_factory=dict)  # other ones, by device
    rings: bool = True  # False: the host waits for the device in each split layer
    declined: str = ""  # reason why no layer of this model is split; found in the first graph

    def min_batch_of(self, nth: int) -> MinBatch:
        """Return the thresholds of the `nth` device."""
        return self.min_batches[nth] if self.min_batches else self.min_batch

    def splitter_of(self, nth: int) -> Splitter:
        """Return the splitter of the `nth` device."""
        return self.splitters.get(nth, self.splitter)

    def splits(self, n_tokens: int) -> bool:
        """True if layers of a batch of `n_tokens` are split, whatever min-batch is."""
        return (
            self.may_split
            and 0 < n_tokens <= SMALL_BATCH  # 0 tokens: the last layer, if no logits are wanted
            and not self.declined
            and n_tokens not in self.unsplit
        )

    def shares_prompts(self, n_tokens: int) -> bool:
        """True if device and CPU share the layers of a prompt's batch, in passes.

        They do if the splitter can divide any number of tokens, which `stay` cannot: a prompt would
        leave most experts to the CPU.
        """
        is_on = self.may_split and self._divides and not self.declined
        return is_on and n_tokens > SMALL_BATCH

    def splitting_by(self, splitter: Splitter) -> Ways:
        """Return ways by which all devices divide layers by `splitter`, if `unsplit` lets them."""
        return replace(self, splitter=splitter, splitters={}, may_split=True)

    @property
    def _divides(self) -> bool:
        return self.splitter is not stay or bool(self.splitters)

    @property
    def graph_key(self) -> Hashable:
        """A key that changes if graphs have other split or shared layers than before."""
        return self.may_split, self.declined, self.unsplit, self._divides

    @property
    def split_sizes(self) -> list[int]:
        """Sizes of small batches whose layers are split, ascending."""
        return [n for n in range(1, SMALL_BATCH + 1) if self.splits(n)]
