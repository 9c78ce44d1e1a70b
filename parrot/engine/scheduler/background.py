"""How much of a step fills may take that nobody waits for yet."""

_BESIDE_TOKENS = 32  # few, so that no single step becomes much longer
_SMOOTHING = 0.1


class BackgroundPace:
    """Background fills run alone, in chunks of `chunk_size` tokens, or beside jobs that generate,
    never beside other fills. Beside others they take a few tokens and then pause, until what they
    cost is at most `share` of the time of the steps since. What a step costs is measured, so it
    does not matter why it became longer."""

    def __init__(self, share: float, chunk_size: int) -> None:
        self._share = share
        self._chunk_size = chunk_size
        self._decode_s: float | None = None
        self._credit_s = 0.0

    def num_tokens(self, num_decoding: int) -> int:
        """For the next step, in which so many jobs generate."""
        if not num_decoding:
            return self._chunk_size
        return min(_BESIDE_TOKENS, self._chunk_size) if self._credit_s > 0.0 else 0

    def stepped(self, elapsed_s: float, num_background: int) -> None:
        """A step is over in which jobs generated and so many background tokens were computed, and
        nothing else."""
        if not num_background:
            before = elapsed_s if self._decode_s is None else self._decode_s
            self._decode_s = before + _SMOOTHING * (elapsed_s - before)
        if self._decode_s is None:
            return
        earned_s = self._share * self._decode_s
        spent_s = max(0.0, elapsed_s - self._decode_s) if num_background else 0.0
        self._credit_s = min(earned_s, self._credit_s + earned_s - spent_s)
