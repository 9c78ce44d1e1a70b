"""The queues and policies that keep jobs in order, and how much of a step fills may take that
nobody waits for yet."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from parrot.engine.core.jobs import Job

_MIN_TOKENS = 32
_SMOOTHING = 0.25
_LITTLE, _MUCH = 0.25, 0.75  # of a step's time


class BackgroundPace:
    """Background fills run alone, in chunks of `chunk_size` tokens, or beside jobs that generate,
    never beside other fills. Beside others they take a chunk and then pause, until what it cost is
    at most a share of the time of the steps since. What a step costs is measured, so it does not
    matter why it became longer. So is the size of these chunks: large ones cost less per token, but
    none should make a step much longer."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._num_beside = min(_MIN_TOKENS, chunk_size)
        self._decode_s: float | None = None
        self._credit_s = 0.0
        self._has_paused = True

    def num_tokens(self, num_decoding: int) -> int:
        """For the next step, in which so many jobs generate."""
        if not num_decoding:
            return self._chunk_size
        return self._num_beside if self._has_paused and self._credit_s > 0.0 else 0

    def planned(self, num_background: int) -> None:
        """A step in which jobs generate has so many background tokens."""
        self._has_paused = not num_background  # else nobody would know what steps cost without

    def stepped(self, elapsed_s: float, num_background: int, share: float) -> None:
        """A step is over in which jobs generated and so many background tokens were computed, and
        nothing else. `share`: how much longer such steps may become on average."""
        if not num_background:
            before = elapsed_s if self._decode_s is None else self._decode_s
            self._decode_s = before + _SMOOTHING * (elapsed_s - before)
        if self._decode_s is None:
            return
        earned_s = share * self._decode_s
        spent_s = max(0.0, elapsed_s - self._decode_s) if num_background else 0.0
        self._credit_s = min(earned_s, self._credit_s + earned_s - spent_s)
        if num_background:
            self._resize(num_background, spent_s / self._decode_s)

    def _resize(self, num_tokens: int, longer: float) -> None:
        if longer > _MUCH:
            self._num_beside = max(self._num_beside // 2, min(_MIN_TOKENS, self._chunk_size))
        elif longer < _LITTLE and num_tokens >= self._num_beside:
            self._num_beside = min(self._num_beside * 2, self._chunk_size)


_KEY = attrgetter("key")


class JobQueue:
    """Jobs in order of their keys. A job's key must not change while it is in a queue."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """A snapshot, so the loop may change the queue."""
        return iter(self._jobs[:])

    def __contains__(self, job: Job) -> bool:
        at = bisect_left(self._jobs, job.key, key=_KEY)
        return at < len(self._jobs) and self._jobs[at] is job

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=_KEY)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._jobs, job.key, key=_KEY)
        assert self._jobs[at] is job, f"job {job.job_id} is not in the queue"
        del self._jobs[at]


POLICIES: dict[str, Callable[[Job], tuple[int, ...]]] = {
    "priority": lambda job: (job.priority, job.place, job.job_id),
    "fcfs": lambda job: (int(job.is_background), job.job_id),
}
"""Each gives a job its key, by which jobs run: unique and total, so that the first of all jobs
always runs and all end some day. Background jobs come after all others."""
