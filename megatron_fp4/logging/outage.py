"""What becomes of a log that cannot be written: training goes on, and it is said, once, what is missing."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0


class Outage:
    """Whether one destination of a run's log works: said once when it fails, tried again later, said when it is back.

    name: of the destination. meanwhile: what happens to what cannot be written, as the rest of a sentence.
    retry_seconds: between attempts while it fails.
    """

    def __init__(self, name: str, meanwhile: str, retry_seconds: float = RETRY_SECONDS) -> None:
        self.name, self.failures = name, 0
        self._meanwhile, self._retry_seconds = meanwhile, retry_seconds
        self._since: float | None = None
        self._next_try = 0.0

    @property
    def on(self) -> bool:
        """Whether the last attempt failed."""
        return self._since is not None

    @property
    def may_try(self) -> bool:
        """Whether to try at all: always while it works, every `retry_seconds` while it does not."""
        return not self.on or time.monotonic() >= self._next_try

    def failed(self, error: Exception) -> None:
        """An attempt failed; the first one in a row is said."""
        self.failures += 1
        now = time.monotonic()
        self._next_try = now + self._retry_seconds
        if self._since is None:
            self._since = now
            logger.error(
                "LOGGING FAILED, training goes on: %s: %s: %s; %s, and it is tried again every %.0f s",
                self.name, type(error).__name__, error, self._meanwhile, self._retry_seconds,
            )  # fmt: skip

    def worked(self, told: str = "") -> None:
        """An attempt succeeded; after failures that is said, with `told` about what was missed."""
        if self._since is None:
            return
        seconds, self._since = time.monotonic() - self._since, None
        logger.warning("%s works again after %.0f s%s", self.name, seconds, f"; {told}" if told else "")
