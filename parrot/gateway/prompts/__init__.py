"""Conversations as text, and answers as their parts.

It must not know any vendor's wire format."""
