"""The columns of the int32 arrays that the sampling kernels read.

Some columns hold the bits of a float32."""

NUM_SETTINGS = 8
KEY_0, KEY_1, INVERSE_TEMPERATURE, FLOOR, TOP_K, TOP_P = range(6)
"""The sampling settings of a row of logits.

KEY_0, KEY_1         the noise key (noise.py)
INVERSE_TEMPERATURE  float32; 0 for greedy rows, whose other columns are ignored
FLOOR                float32, the lowest score that may be sampled. A score is the scaled
                     difference between a logit and the largest logit
TOP_K                0 for no limit
TOP_P                float32; 1 for no limit"""

NUM_COLUMNS = 8
ROW, PENDING_AT, FIRST, END, PRESENCE, FREQUENCY, REPETITION = range(7)
"""A row of logits with penalties or biases.

ROW         index of the row
PENDING_AT  index in the step's tokens of a token that its entries do not count yet; -1 for none
FIRST, END  its range of entries

The penalties are float32. A repetition penalty of 1 has no effect."""

NUM_FIELDS = 3
TOKEN, COUNT, BIAS = range(NUM_FIELDS)
"""An entry: a token whose logit changes. The tokens of a row's entries are distinct.

COUNT  number of times that the token is in the output; -1 if it is not in the context either
BIAS   float32"""
