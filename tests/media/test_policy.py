from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from epd.config.sections.limits import MediaSettings
from epd.errors import BadRequest
from epd.media.policy import MAX_URL, allows_address, check_url

PUBLIC = MediaSettings(media_fetch="proxy")
HTTP = MediaSettings(media_fetch="proxy", allow_http_media=True)
INSIDE = MediaSettings(
    media_fetch="proxy",
    allowed_media_domains=("media.test", "127.0.0.1"),
    allow_private_media=True,
)

PRIVATE = [
    *("10.1.2.3", "100.64.0.1", "127.0.0.1", "127.8.8.8", "172.31.0.1", "192.168.1.1"),
    *("::1", "fd12::1"),
]
NEVER = [
    *("0.0.0.0", "169.254.169.254", "192.0.0.8", "192.0.2.1", "192.88.99.1", "198.18.0.1"),  # noqa: S104
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("100.100.100.200", "168.63.129.16", "fd00:ec2::254"),
    *("::", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "100::1", "5f00::1"),
    *("2001::1", "2001:db8::1", "3fff::1", "", "localhost"),
    # IPv4 in IPv6: mapped, compatible, NAT64 (well-known and local), 6to4, Teredo.
    *("::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::8.8.8.8", "64:ff9b:1::8.8.8.8"),
    *("2002:808:808::1", "2001:0:808:808::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
]


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2606:4700::1111"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert allows_address(PUBLIC, address)
    assert allows_address(INSIDE, address)


@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.security("S7")
def test_private_addresses_are_allowed_only_by_flag(address: str) -> None:
    assert not allows_address(PUBLIC, address)
    assert allows_address(INSIDE, address)


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.security("S7")
def test_media_policy_never_allows_these_addresses(address: str) -> None:
    assert not allows_address(PUBLIC, address)
    assert not allows_address(INSIDE, address)


@pytest.mark.security("S7")
@given(st.ip_addresses())
def test_media_policies_allow_no_special_addresses(address: IPv4Address | IPv6Address) -> None:
    if allows_address(PUBLIC, str(address)):
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_link_local


@pytest.mark.security("S7")
@pytest.mark.parametrize(
    "url",
    [
        "http://a.test/x",
        "ftp://a.test/x",
        "file:///etc/passwd",
        "https:///x",
        "https:x",
        "//a.test/x",
        "https://user@a.test/",
        "https://user:pass@a.test/",
        "https://a.test\\@b.test/",
        "https://a.test/\tx",
        "https://a.test:99999/",
        "https://127.0.0.1/",
        "https://127.0.0.1./",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f.0.0.1/",
        "https://0x7f000001/",
        "https://0177.0.0.1/",
        "https://１２７.０.０.１/",  # noqa: RUF001 - digits that IDNA folds
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://169.254.169.254/latest/meta-data",
        "https://a.test/" + "x" * MAX_URL,
        "",
    ],
)
def test_urls_that_may_not_be_fetched(url: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        check_url(PUBLIC, url)

    assert refusal.value.slug == "media_not_allowed"


def test_urls_that_may_be_fetched() -> None:
    assert check_url(PUBLIC, "https://a.test/x?y#z") == URL("https://a.test/x?y")
    assert check_url(PUBLIC, "HTTPS://8.8.8.8:8443/") == URL("https://8.8.8.8:8443/")
    assert check_url(PUBLIC, "https://[2606:4700::1111]/").raw_host == "2606:4700::1111"
    assert check_url(HTTP, "http://a.test/").scheme == "http"


def test_media_policy_with_hosts_allows_only_these_hosts() -> None:
    for good in ("https://media.test/", "https://MEDIA.test.:8443/", "https://127.0.0.1/"):
        check_url(INSIDE, good)
    for bad in ("https://x.media.test/", "https://media.test.evil/", "https://127.0.0.2/"):
        with pytest.raises(BadRequest):
            check_url(INSIDE, bad)


@pytest.mark.security("S7")
def test_a_redirect_is_read_against_where_it_came_from_and_checked() -> None:
    base = URL("https://media.test/a/b")

    assert check_url(INSIDE, "../c?d", base) == URL("https://media.test/c?d")
    for bad in ("//evil.test/", "http://media.test/", "/\\evil.test", "https://10.0.0.1/"):
        with pytest.raises(BadRequest):
            check_url(INSIDE, bad, base)


@given(
    st.text() | st.from_regex(r"https?:/{0,3}.*"), st.none() | st.just(URL("https://media.test"))
)
def test_any_url_is_rejected_or_allowed_by_the_policy(text: str, base: URL | None) -> None:
    try:
        url = check_url(INSIDE, text, base)
    except BadRequest as refusal:
        assert refusal.slug == "media_not_allowed"
    else:
        assert url.scheme == "https"
        assert (url.raw_host or "").rstrip(".") in INSIDE.allowed_media_domains
        assert url == URL(str(url))
