"""Drafts: tokens that an output is likely to go on with, found in text that the engine holds. A
step verifies several at once. Knows tokens and costs; not contexts, jobs or steps."""
