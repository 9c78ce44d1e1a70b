"""The layout of what the sampling kernels read: columns of int32 arrays.

Some columns hold the bits of a float32."""

NUM_SETTINGS = 8
KEY_0, KEY_1, INVERSE_TEMPERATURE, FLOOR, TOP_K, TOP_P = range(6)
"""Columns of a row whose token is drawn. The keys are noise.py's. INVERSE_TEMPERATURE: float32;
zero for the largest logit, and then the rest does not matter. FLOOR: float32, the least score that
may be drawn; a score is a logit's distance to the largest, scaled. TOP_K: zero if any. TOP_P:
float32, one if any."""

NUM_COLUMNS = 8
ROW, PENDING_AT, FIRST, END, PRESENCE, FREQUENCY, REPETITION = range(7)
"""Columns of a row whose logits are adjusted. ROW: of the logits. PENDING_AT: where among the
step's tokens its newest is, if that is not counted in its entries; else -1. Its entries are [FIRST,
END). The penalties are float32; a repetition penalty of one changes nothing."""

NUM_FIELDS = 3
TOKEN, COUNT, BIAS = range(NUM_FIELDS)
"""Fields of an entry, a token whose logit is adjusted. COUNT: how often the token is in the output;
-1 if it is not in the context either, so only biased. BIAS: float32. A row has no two entries of
one token."""
