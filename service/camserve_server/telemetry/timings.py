"""Time that a request spends in the batcher."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimings:
    """Seconds that a request waits and computes. No second counts twice.

    A request may have several batches running at the same time, on one worker or on several, while more of its rows
    wait. Time in which at least one of its batches runs is `compute`, counted once. The rest of the wait is `queue`.
    Their sum is never more than the duration of the request.

    Attributes:
        queue: seconds in which rows waited and no batch ran.
        compute: seconds in which at least one batch ran.
        batch_rows: number of rows in the largest batch.
        submitted: number of calls to `submit` that have not returned yet.
        running: number of batches that are running.
        since: time at which `submitted` or `running` last changed.
    """

    queue: float = 0.0
    compute: float = 0.0
    batch_rows: int = 0
    submitted: int = 0
    running: int = 0
    since: float = 0.0

    def change(self, now: float, *, submitted: int = 0, running: int = 0) -> None:
        """Count the time up to now, and change the number of calls or of batches.

        Args:
            now: time on the event loop's clock.
            submitted: calls that started, minus those that returned.
            running: batches that started, minus those that ended.
        """
        if self.running:
            self.compute += now - self.since
        elif self.submitted:
            self.queue += now - self.since
        self.since = now
        self.submitted += submitted
        self.running += running
