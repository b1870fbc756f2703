"""Parsing of instances, allowed hosts, and valid addresses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.discovery.entries import (
    EntriesInvalid,
    read_json,
    read_yaml,
    registration,
    write_json,
)
from epd.http.http1 import target_of
from epd.routing.instances import Instance, Role
from epd.routing.urls import (
    at_address,
    base_url,
    check_pattern,
    is_allowed,
    name_server,
    registration_store_url,
    service_url,
)

INSTANCES = st.lists(
    st.builds(
        Instance,
        st.sampled_from(Role),
        st.integers(1, 9).map(lambda number: f"http://h{number}:80"),
        st.integers(1, 1024),
        st.sampled_from([1.0, 0.0, 2.5]),
    )
    | st.builds(
        lambda number, ranks: Instance(
            Role.PREFILL_DECODE,
            f"http://h{number}:80",
            ranks,
            ec_zmq_addrs=tuple(f"tcp://h{number}:{19019 + rank}" for rank in range(ranks)),
        ),
        st.integers(1, 9),
        st.integers(1, 8),
    ),
    unique_by=lambda one: (one.role, one.url),
)


@given(INSTANCES)
def test_written_entries_can_be_read_as_json_and_as_yaml(instances: list[Instance]) -> None:
    written = write_json(instances)

    assert read_json(written) == read_yaml(written) == tuple(instances)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_is_read_or_refused(raw: bytes) -> None:
    for read in (read_json, read_yaml, registration):
        try:
            read(raw)
        except EntriesInvalid as error:
            assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", "instances"),
        ("instances: {}", "instances"),
        ("instances: [{role: encode}]", "instances.0.url"),
        ("instances: [{role: chef, url: 'http://e:1'}]", "instances.0.role"),
        ("instances: [{role: encode, url: 'ftp://e:1'}]", "is not a URL"),
        ("instances: [{role: encode, url: 'http://e:1', size: 2}]", "instances.0.size"),
        ("instances: [{role: encode, url: 'http://e:1', dp_size: 0}]", "instances.0.dp_size"),
        (
            "instances: [{role: prefill, url: 'http://p:1', ec_zmq_addrs: ['tcp://p:1', 'x']}]",
            "instances.0.ec_zmq_addrs.1: 'x' is not an address",
        ),
        (
            "instances: [{role: prefill, url: 'http://p:1', dp_size: 2, ec_zmq_addrs: ['tcp://p:1']}]",
            "one address for each data-parallel rank",
        ),
        (
            "instances: [{role: encode, url: 'http://e:1', ec_zmq_addrs: ['tcp://e:1']}]",
            "is only for consumers",
        ),
        ("version: 2\ninstances: []", "version"),
        ("a: &a [*a]\ninstances: *a", "not valid YAML"),
        ("instances: [{role: encode, url: 'http://e'}, {url: 'http://e/', role: encode}]", "twice"),
        ("\x00", "not valid YAML"),
        ("instances: 2001-99-99", "instances"),
        ("instances: !!timestamp x", "instances"),
        ("instances: [!!python/object:os.system {}]", "instances.0"),
        ("{" * 5000, "not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_place_of_the_error(raw: str, message: str) -> None:
    with pytest.raises(EntriesInvalid, match=message):
        read_yaml(raw.encode())


@pytest.mark.parametrize(
    ("patterns", "url", "allowed"),
    [
        ([], "http://anything:1", True),
        (["e.example"], "http://e.example:1", True),
        (["e.example"], "http://f.example:1", False),
        (["*.svc.local"], "http://e.svc.local:1", True),
        (["*.svc.local"], "http://svc.local:1", False),
        (["*.svc.local"], "http://esvc.local:1", False),
        (["10.0.0.0/8"], "http://10.1.2.3:1", True),
        (["10.0.0.0/8"], "http://11.1.2.3:1", False),
        (["10.0.0.0/8"], "http://10.1.2.3.example:1", False),
        (["10.1.2.3"], "http://10.1.2.3:1", True),
        (["fd00::/8"], "http://[fd00::1]:1", True),
        (["e.example"], "http://169.254.169.254", False),
    ],
)
def test_a_host_is_allowed_by_name_or_by_network(
    patterns: list[str], url: str, allowed: bool
) -> None:
    assert is_allowed(url, [check_pattern(pattern) for pattern in patterns]) is allowed


@pytest.mark.parametrize("pattern", ["", "*", "a b", "http://e", "10.0.0.0/99", "user@e", "a:1"])
def test_an_invalid_host_is_rejected(pattern: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        check_pattern(pattern)


def test_urls_of_names_and_of_their_addresses() -> None:
    assert service_url("e:8000") == "http://e:8000"
    assert service_url("https://E:8000/") == "https://e:8000"
    assert at_address("https://e:8000/v", "10.0.0.1") == "https://10.0.0.1:8000/v"
    assert at_address("http://e:8000", "fd00::1") == "http://[fd00::1]:8000"
    assert name_server("10.0.0.1") == ("10.0.0.1", 53)
    assert name_server("[fd00::1]:5353") == ("fd00::1", 5353)
    assert name_server("fd00::1") == ("fd00::1", 53)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pw@host:6379/1?key=a",
        "rediss://host?ssl_ca_certs=/ca.pem",
    ],
)
def test_stores_of_registrations(url: str) -> None:
    assert registration_store_url(url) == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://host", "must be redis://host:6379"),
        ("file:///var/lib/epd", "must be redis://host:6379"),
        ("redis://:SECRET@host:SECRET", "its port is invalid"),
        ("redis://host?password=SECRET", "unknown parameter 'password'; known: key"),
        ("redis://host?ssl_ca_certs=/ca.pem", "unknown parameter 'ssl_ca_certs'; known: key"),
    ],
)
def test_an_invalid_registration_store_is_rejected_without_quoting_it(
    url: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        registration_store_url(url)

    assert "SECRET" not in str(refused.value)


@pytest.mark.fault(73)
@pytest.mark.parametrize("host", ["a\\b:80", "a\u200bb", "a\u00adb", "ä..b", "a:99999"])
def test_a_url_that_no_request_can_be_sent_to_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)is not a URL such as|port out of range"):
        base_url(f"http://{host}/")
    with pytest.raises(EntriesInvalid):
        registration(json.dumps({"role": "encode", "url": f"http://{host}/"}).encode())


HOSTS = st.text(max_size=20) | st.text("ab.-_:[]%\\ä\u200b\u00ad0x/?", max_size=12)


@pytest.mark.fault(73)
@given(host=HOSTS)
def test_every_accepted_url_can_be_requested(host: str) -> None:
    try:
        url = base_url(f"http://{host}")
    except ValueError:
        return
    assert target_of(f"{url}/health").origin == target_of(url).origin


@pytest.mark.parametrize("url", ["http://user:SECRET@h", "user:SECRET@h", "http://h/?key=SECRET"])
def test_a_password_in_an_instances_url_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="must be a") as refused:
        base_url(url)

    assert "SECRET" not in str(refused.value)
