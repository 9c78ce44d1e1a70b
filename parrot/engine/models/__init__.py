"""Models: from a checkpoint to a forward pass.

This package reads weights, configurations and tokenizers, and builds one decoder for all
architectures. It owns the weights and their layout in memory. It does not know contexts, blocks or
sampling: attention is passed in for each step."""
