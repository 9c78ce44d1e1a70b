"""Looking at a running ServeCore from a terminal, by what its page is drawn of."""
