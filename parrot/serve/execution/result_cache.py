"""Cached results of finished calls, for later identical calls.

Identical calls have the same prompt text, cache salt, models, chat flag and sampling parameters.
The sampling must be greedy or seeded."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from sys import getsizeof
from typing import NamedTuple

from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.graph.nodes import Completion, RunStats, TokenizedText
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict

_ENTRY_BYTES = 400  # Estimated memory of a cached result without its text and ids, in bytes.
_SAMPLING_FIELDS = tuple(SamplingConfig.model_fields)


class Result(NamedTuple):
    """The cached result of a finished call."""

    text: str
    tokenizer_id: str | None
    ids: "array[int] | None"  # None: no token ids stand for exactly this text.
    stats: RunStats  # Of the run that computed the result.
    session_id: int  # Of the call that computed the result.
    expires_at: float
    num_bytes: int

    @property
    def tokenized(self) -> TokenizedText | None:
        if self.tokenizer_id is None or self.ids is None:
            return None
        return TokenizedText(self.tokenizer_id, tuple(self.ids))


class ResultCache:
    """Results by cache salt and key, up to `reuse_cache_size` bytes.

    Above the limit, the salt with the most bytes loses its least recently used results. So no
    tenant can evict all results of the others."""

    def __init__(self, config: GlobalSchedulerConfig, clock: Clock) -> None:
        self.num_bytes = 0
        self._max_bytes = config.reuse_cache_size
        self._ttl_s = config.reuse_timeout
        self._clock = clock
        self._by_salt: dict[str, LruDict[bytes, Result]] = {}

    def key(self, completion: Completion, prompt_keys: Sequence[bytes]) -> bytes:
        """A key that is equal for identical calls. The last prompt key covers the salt, the chat
        flag and the prompt. It is derived from a secret, so clients cannot forge it."""
        options, sampling = completion.options, completion.sampling
        fields = sampling.__dict__
        values = [fields[name] for name in _SAMPLING_FIELDS]
        rest = repr((options.models, values)).encode("utf-8", "surrogatepass")
        return hashlib.sha256(prompt_keys[-1] + rest).digest()

    def get(self, salt: str, key: bytes) -> Result | None:
        results = self._by_salt.get(salt)
        result = None if results is None else results.get(key)
        if result is not None and result.expires_at <= self._clock.now():
            self._remove(salt, key)
            return None
        return result

    def put(
        self,
        salt: str,
        key: bytes,
        text: str,
        tokenized: TokenizedText | None,
        stats: RunStats,
        session_id: int,
    ) -> None:
        """Cache a result, unless it is larger than the whole cache."""
        ids = None if tokenized is None else array("i", tokenized.ids)
        num_bytes = _ENTRY_BYTES + getsizeof(text) + (0 if ids is None else ids.itemsize * len(ids))
        num_bytes += 0 if stats.logprobs is None else stats.logprobs.num_bytes
        if num_bytes > self._max_bytes:
            return
        tokenizer_id = None if tokenized is None else tokenized.tokenizer_id
        expires_at = self._clock.now() + self._ttl_s
        self._remove(salt, key)
        results = self._by_salt.setdefault(salt, LruDict(weigh=_num_bytes))
        result = Result(text, tokenizer_id, ids, stats, session_id, expires_at, num_bytes)
        results.put(key, result)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._by_salt, key=lambda name: self._by_salt[name].weight)
            self._remove(largest, next(iter(self._by_salt[largest])))

    def check_integrity(self) -> None:
        for salt, results in self._by_salt.items():
            assert len(results), salt
            assert results.weight == sum(map(_num_bytes, results.values())), salt
        assert self.num_bytes == sum(results.weight for results in self._by_salt.values())
        assert self.num_bytes <= self._max_bytes, (self.num_bytes, self._max_bytes)

    def _remove(self, salt: str, key: bytes) -> None:
        results = self._by_salt.get(salt)
        result = None if results is None else results.pop(key)
        if results is None or result is None:
            return
        self.num_bytes -= result.num_bytes
        if not len(results):
            del self._by_salt[salt]


def reused_stats(stats: RunStats, session_id: int) -> RunStats:
    """The statistics of a call that reuses the result of a call of session `session_id`. Counts of
    work are 0."""
    return replace(
        stats,
        attempts=0,
        cached_tokens=0,
        computed_tokens=0,
        recomputed_tokens=0,
        drafted_tokens=0,
        accepted_tokens=0,
        used_tokens=0,
        is_reused=True,
        reused_from=session_id,
    )


def _num_bytes(result: Result) -> int:
    return result.num_bytes
