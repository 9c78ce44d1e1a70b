import pytest

from parrot.engine.openai.upstream import Overloaded
from parrot.protocol import errors
from parrot.protocol.errors import ParrotError, error_from_payload


def all_errors() -> list[type[ParrotError]]:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    return [c for c in classes if issubclass(c, ParrotError) and c is not ParrotError]


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_can_be_serialized(cls: type[ParrotError]) -> None:
    sent = cls("what went wrong", param="field")
    received = error_from_payload(sent.to_payload(), cls.status)
    assert type(received) is cls
    assert (received.message, received.param) == ("what went wrong", "field")


def test_types_are_unique_and_documented_with_their_status() -> None:
    classes = all_errors()
    assert len({cls.type for cls in classes}) == len(classes)
    assert errors.__doc__ is not None
    rows = {
        words[0]: words[1]
        for line in errors.__doc__.splitlines()
        if len(words := line.replace("|", " ").replace("`--", " ").replace("--", " ").split()) >= 2
    }
    for cls in classes:
        assert rows[cls.__name__] == str(cls.status)


@pytest.mark.parametrize(
    ("payload", "status", "expected"),
    [
        (None, 404, errors.NotFound),
        ("text", 503, errors.Unavailable),
        ({"detail": "fastapi"}, 422, errors.ValidationFailed),
        ({"error": "a string"}, 409, errors.Conflict),
        ({"error": {"type": "newer_than_us", "message": "m"}}, 429, errors.QuotaExceeded),
        ({"error": {"type": 7, "message": 7, "param": 7}}, 400, errors.InvalidRequest),
        ({}, 418, errors.InternalError),
    ],
)
def test_errors_of_other_servers_get_the_class_of_their_status(
    payload: object, status: int, expected: type[ParrotError]
) -> None:
    error = error_from_payload(payload, status)
    assert type(error) is expected
    assert error.message


def test_param_is_absent_from_the_payload_when_there_is_none() -> None:
    assert errors.TimedOut("late").to_payload() == {
        "error": {"type": "timed_out", "message": "late"}
    }


def test_a_stored_error_is_raised_as_a_copy() -> None:
    """Raising the stored error itself would keep every frame of its traceback alive."""
    kept = errors.QueueFull("full", param="model", retry_after_s=2.0)
    kept.__cause__ = ValueError("why")
    with pytest.raises(errors.QueueFull, match="full") as caught:
        raise kept.again()
    again = caught.value
    assert again is not kept
    assert (again.param, again.retry_after_s, again.__cause__) == ("model", 2.0, kept.__cause__)
    assert kept.__traceback__ is None


def test_a_stored_error_with_other_arguments_is_copied() -> None:
    assert Overloaded("busy", retry_after_s=3.0).again().retry_after_s == 3.0
