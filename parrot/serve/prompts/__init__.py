"""Prompts: converts a completion's pieces to segments, prefix keys and token ids.

This package owns the models' tokenizers and chat templates, and defines when two prompts share a
prefix. It does not know engines, contexts or queues."""
