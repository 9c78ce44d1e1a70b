"""What the benchmark of drafts has a model say, and a device in virtual time that says it."""
