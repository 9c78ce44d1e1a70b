"""Drafts: proposed next tokens of an output, found in text that the engine holds.

One step verifies several draft tokens. This package knows tokens and costs, not contexts, jobs or
steps.
"""
