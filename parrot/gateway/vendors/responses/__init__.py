"""OpenAI's responses: turns whose items are kept, so that the next turn need not bring them."""
