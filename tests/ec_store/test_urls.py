import pytest

from ec_store import check_url


def test_check_url_suggests_the_url_for_a_path() -> None:
    with pytest.raises(ValueError, match=r"is file:///dev/shm/ec meant\?$"):
        check_url("/dev/shm/ec")  # noqa: S108 - nothing is opened


@pytest.mark.parametrize("url", ["", "ec", "http://host/ec", "file//dev/shm/ec"])
def test_check_url_names_the_schemes_of_stores_for_any_other_scheme(url: str) -> None:
    with pytest.raises(
        ValueError, match="is not the URL of a store: use one of file://, mooncake://, redis"
    ):
        check_url(url)
