"""What is run: each a frozen dataclass of parameters that plans jobs."""
