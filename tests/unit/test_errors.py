from __future__ import annotations

import pickle

import pytest

import alkstore_sa
from alkstore_sa import AlkstoreError, Lagged, errors

FAMILY = [getattr(errors, name) for name in errors.__all__]
BAD_ARGUMENTS = {"InvalidName", "ReservedName", "InvalidSpec", "PayloadError", "PayloadTooLarge"}
PROMISED = {
    *BAD_ARGUMENTS,
    "AlkstoreError",
    "LeaseLost",
    "LockHeld",
    "LockLost",
    "LeadershipLost",
    "BindError",
    "Lagged",
    "SchemaMissing",
    "SchemaMismatch",
    "UnsupportedDialect",
}


def test_the_family_is_the_promised_one() -> None:
    assert set(errors.__all__) == PROMISED


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_has_the_one_root(error: type[Exception]) -> None:
    assert issubclass(error, AlkstoreError)


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_is_offered_by_the_package(error: type[Exception]) -> None:
    assert getattr(alkstore_sa, error.__name__) is error
    assert error.__name__ in alkstore_sa.__all__


@pytest.mark.parametrize("error", FAMILY)
def test_an_error_is_a_value_error_exactly_if_it_says_that_an_argument_is_bad(error: type[Exception]) -> None:
    assert issubclass(error, ValueError) is (error.__name__ in BAD_ARGUMENTS)


def test_a_payload_that_is_too_large_is_a_payload_error() -> None:
    assert issubclass(errors.PayloadTooLarge, errors.PayloadError)


def test_an_unsupported_dialect_is_a_bind_error() -> None:
    assert issubclass(errors.UnsupportedDialect, errors.BindError)


def test_lagged_tells_how_many_were_missed() -> None:
    error = Lagged(missed=3)
    assert error.missed == 3
    assert "3" in str(error)


@pytest.mark.parametrize("error", [cls for cls in FAMILY if cls is not Lagged])
def test_an_error_survives_being_pickled(error: type[Exception]) -> None:
    copy = pickle.loads(pickle.dumps(error("why")))
    assert (type(copy), str(copy)) == (error, "why")


def test_lagged_survives_being_pickled() -> None:
    copy = pickle.loads(pickle.dumps(Lagged(7)))
    assert (copy.missed, str(copy)) == (7, str(Lagged(7)))
