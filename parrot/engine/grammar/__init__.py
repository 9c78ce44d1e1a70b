"""Constrained outputs: from a JSON schema, a regular expression, a Lark grammar or a list of
choices to the tokens that may come next. llguidance does the parsing."""
