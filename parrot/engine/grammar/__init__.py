"""Constrained outputs: a JSON schema, a regular expression, a Lark grammar or a list of choices
becomes a mask of the allowed next tokens. llguidance does the parsing."""
