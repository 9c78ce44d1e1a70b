"""OpenAI's Responses API: turns whose items are stored, so that later turns can refer to them."""
