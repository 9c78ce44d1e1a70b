"""The openai engine, which forwards work to a foreign server with OpenAI's API.

This package turns a Generate into one request to the foreign server, retries temporary failures and
translates errors. It stores the text of each context and orders the jobs of each context. Tokens
and KV exist only in the foreign server.
"""
