"""The openai engine: a server with OpenAI's API stands behind it.

This room turns a Generate into one request to that server, tries again what may pass, and
translates its errors. It owns the texts of the engine's contexts and the turns of their jobs. It
must not know of tokens or KV: the foreign server has those.
"""
