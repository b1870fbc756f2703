"""Values and parameters of the URLs of stores."""

import pytest

from ec_store.config import duration_s, parameters, redacted, size_bytes


def test_quantities_of_urls() -> None:
    assert size_bytes("64GiB") == size_bytes("64Gi") == 64 * 2**30
    assert size_bytes("1.5 mb") == 1_500_000
    assert duration_s("7d") == 7 * 86400
    assert duration_s("20ms") == 0.02
    for wrong in ("", "x", "-1", "1 parsec", "1e3"):
        with pytest.raises(ValueError, match="is not a"):
            size_bytes(wrong)


def test_parameters_of_urls() -> None:
    known = {"ttl": duration_s}
    assert parameters("file:///x?ttl=1s", known) == {"ttl": 1.0}
    for wrong in ("file:///x?tll=1s", "file:///x?ttl=1s&ttl=2s", "file:///x?ttl=soon"):
        with pytest.raises(ValueError, match="parameter"):
            parameters(wrong, known)


def test_a_password_is_not_shown() -> None:
    for password in ("secret", "sec@ret", "sec/ret"):
        assert redacted(f"rediss://user:{password}@host/0") == "rediss://***@host/0"
