"""The key of an engine's config with which outputs are as the model's distribution is, for tests
that compare texts: the embedded model has other defaults."""

PLAIN_SAMPLING = {"default_sampling": {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}}
