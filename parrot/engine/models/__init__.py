"""Models: from a checkpoint to a forward pass.

This room reads weights, configurations and tokenizers, and builds one decoder for all
architectures. It owns the weights and how they are stored for speed. It must not know of contexts,
blocks or sampling: attention is handed to it for each step."""
