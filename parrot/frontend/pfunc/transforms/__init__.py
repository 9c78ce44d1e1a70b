"""Transforms of prompts: formatters tidy up constants, conversation templates make chats.

Each makes a new function from a function before it is called. None may look at values."""
