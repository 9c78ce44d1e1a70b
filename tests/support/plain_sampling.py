"""Config for tests that compare outputs: the embedded model samples from its own distribution,
without its default settings."""

PLAIN_SAMPLING = {"default_sampling": {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}}
