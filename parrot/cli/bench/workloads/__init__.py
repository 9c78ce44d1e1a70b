"""The workloads: each a frozen dataclass of parameters that plans jobs."""
