"""What `precompute` came to, in three numbers, and why it stopped if it did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Of the texts that were given: how many were computed now, are in the store now, and could not be explained.

    `kept` counts those too that the store had before. It is less than were given where the store is smaller than that.
    `stopped` says why not all texts were looked at, where what embeds them could not be asked any more: run it again.
    """

    built: int
    kept: int
    failed: int
    stopped: str = ""

    def __str__(self) -> str:
        failed = f"{self.failed} could not be explained" if self.failed else "none failed"
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        return f"{self.built} texts were built now, {self.kept} of those given are in the store, {failed}{stopped}"
