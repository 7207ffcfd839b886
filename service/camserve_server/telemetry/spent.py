"""The time that one request spends in the batcher."""

from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """Seconds of waiting and of computing, of which none counts twice.

    A request may have several batches under way, on two halves of an engine or on several engines, while more of its
    rows wait. Time in which at least one of its batches runs is `compute`, once, and the rest of the wait is `queue`.
    Their sum is therefore never more than the request took.

    Attributes:
        queue: seconds in which its rows waited and none of its batches ran.
        compute: seconds in which at least one of its batches ran.
        batch_rows: rows in the largest of its batches.
        submitted: the number of calls to `submit` that have not returned yet.
        running: the number of its batches that are running.
        since: when one of these two last changed.
    """

    queue: float = 0.0
    compute: float = 0.0
    batch_rows: int = 0
    submitted: int = 0
    running: int = 0
    since: float = 0.0

    def change(self, now: float, *, submitted: int = 0, running: int = 0) -> None:
        """Count the time up to now, and add to the number of calls or of batches.

        Args:
            now: on the event loop's clock.
            submitted: calls that began, less those that returned.
            running: batches that began, less those that ended.
        """
        if self.running:
            self.compute += now - self.since
        elif self.submitted:
            self.queue += now - self.since
        self.since = now
        self.submitted += submitted
        self.running += running
