"""Ids of clients' requests, which the foreign server gets as `X-Request-Id`."""


class IdsInFlight:
    """The ids of the requests in flight. vLLM rejects a request whose id is in flight."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def claim(self, request_id: str) -> str:
        """The id for one request to the server: `request_id`, with a number if it is in flight.
        Empty if it is empty, or if servers might not read its characters. The caller must
        `release` it."""
        if not (request_id.isascii() and request_id.isprintable()):
            request_id = ""
        unique, number = request_id, 1
        while unique in self._used:
            number += 1
            unique = f"{request_id}-{number}"
        if unique:
            self._used.add(unique)
        return unique

    def release(self, unique: str) -> None:
        self._used.discard(unique)
