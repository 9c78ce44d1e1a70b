"""What crosses a process boundary: typed payloads, errors, and the clients that carry them."""
