"""How requests of a servable are joined, and how many may wait."""

from __future__ import annotations

from dataclasses import dataclass

from servax.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Batching:
    """The limits of a servable's queue.

    Attributes:
      max_delay: the longest, in seconds, that a request is held back on a free device for others to join it; 0: never;
        None: adaptive, and never while it is alone.
      max_queue: requests that may wait.
      max_queue_bytes: bytes of their tensors.
    """

    max_delay: float | None = None
    max_queue: int = 4096
    max_queue_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.max_delay is not None and not 0 <= self.max_delay < float("inf"):
            raise UsageError(
                "the delay of batching is not a duration",
                where="max_delay",
                seen=str(self.max_delay),
                expected="seconds, 0 or more",
            )
        for name in ("max_queue", "max_queue_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "a queue without room answers nothing",
                    where=name,
                    seen=str(getattr(self, name)),
                    expected="1 or more",
                )


DEFAULT = Batching()
"""Adaptive, with room for 4096 requests and 1 GiB of tensors."""
