"""The seconds of the headers `retry-after` and `retry-after-ms`."""

from math import ceil

import pytest

from parrot.protocol.errors import QuotaExceeded
from parrot.protocol.transport import own_error, retry_after_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "7", "retry-after-ms": "30"}, 0.03),
        ({"retry-after-ms": "-5"}, 0.0),
        ({"retry-after-ms": "nan"}, 0.0),
        ({"retry-after-ms": "inf"}, 1e9),
        ({"retry-after": "9" * 400}, 1e9),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 9999 07:28:00 GMT"}, 1e9),
    ],
)
def test_waits_are_between_0_and_a_billion_seconds(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    "given", [None, "", "soon", "1.2.3", "²", f"Wed, 21 Oct {10**20} 07:28:00 GMT"]
)
def test_invalid_waits_are_unknown(given: str | None) -> None:
    assert retry_after_s({} if given is None else {"retry-after": given}) is None


def test_the_wait_of_an_error_of_a_parrot_server_is_finite() -> None:
    error = own_error(None, 429, {"retry-after": "9" * 400})
    assert isinstance(error, QuotaExceeded)
    assert error.retry_after_s is not None
    assert ceil(error.retry_after_s) == 10**9
