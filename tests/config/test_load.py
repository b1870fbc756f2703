"""Sources of settings, and error messages for invalid ones."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from epd.config import ConfigInvalid, ProxyConfig
from epd.config.flags import FIELDS, SECRETS, add_flags, metavar_of
from epd.config.load import Loaded, load
from epd.config.shown import as_yaml
from epd.parser import Parser, flag_of
from epd.routing.instances import Role

INSTANCES = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d:1"}
NUMBERS = ("max_items", "max_queue", "header_timeout_s", "media_cache_bytes")
EXAMPLE = Path(__file__).parents[2] / "examples" / "epd.yaml"
SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def loaded(text: str, path: Path, **flags: str) -> Loaded:
    path = path / "epd.yaml" if path.is_dir() else path
    path.write_text(text)
    return load({**INSTANCES, "config": str(path), **flags})


def wrong(text: str, path: Path, **flags: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as invalid:
        loaded(text, path, **flags)
    return [reason.removeprefix(f"{path}/") for reason in invalid.value.reasons]


some = st.dictionaries(st.sampled_from(NUMBERS), st.integers(1, 10**6))


@settings(deadline=None)
@given(flags=some, environment=some, file=some)
def test_flags_go_before_the_environment_and_that_before_the_file(
    flags: Mapping[str, int],
    environment: Mapping[str, int],
    file: Mapping[str, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "precedence.yaml"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(f"EPD_{name.upper()}", str(value))
        made = loaded(
            yaml.safe_dump(dict(file)), path, **{name: str(it) for name, it in flags.items()}
        )

    for name in NUMBERS:
        sources = {"flag": flags, "environment": environment, "file": file}
        source = next((source for source, it in sources.items() if name in it), None)
        default = FIELDS[name].default
        value = default if source is None else sources[source][name]
        assert getattr(made.config, name) == value
        assert (made.settings[name].source if name in made.settings else None) == source


def test_a_list_is_a_list_or_comma_separated(tmp_path: Path) -> None:
    urls = "media_fetch: proxy\nallowed_media_domains: "

    expected = ("a.test", "b.test")
    assert loaded(f"{urls}[a.test, b.test]", tmp_path).config.allowed_media_domains == expected
    assert loaded(f"{urls}\n- a.test\n- b.test", tmp_path).config.allowed_media_domains == expected
    assert loaded(f"{urls}a.test,b.test", tmp_path).config.allowed_media_domains == expected


def test_a_key_without_a_value_and_an_empty_file_set_nothing(tmp_path: Path) -> None:
    assert (
        loaded("max_items:\nec_store: null\nhost: ~\n", tmp_path).config == load(INSTANCES).config
    )
    assert loaded("# nothing\n", tmp_path).config == load(INSTANCES).config


def test_a_file_may_be_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "epd.yaml"
    path.write_text("max_items: 3")
    monkeypatch.setenv("EPD_CONFIG", str(path))

    assert load(INSTANCES).config.max_items == 3


def test_load_reports_all_errors_of_a_file_at_once_with_line_numbers(tmp_path: Path) -> None:
    text = """
max_itemz: 3
max_queue: many
max_items: 3
max_items: 4
port: 010
log_level: off
key_secret: hidden
host: {a: b}
config: other.yaml
zzz: 1
"""
    reasons = sorted(wrong(text, tmp_path), key=lambda reason: int(reason.split(":")[1]))

    assert reasons == [
        "epd.yaml:2: max_itemz is unknown; is max_items meant?",
        "epd.yaml:3: max_queue should be a valid integer",
        "epd.yaml:5: max_items is already set in line 4",
        "epd.yaml:6: port begins with a 0, which YAML reads as an octal number: remove the 0",
        "epd.yaml:7: log_level should be 'debug', 'info', 'warning' or 'error'",
        (
            "epd.yaml:8: key_secret is a secret and not allowed in this file: set "
            "EPD_KEY_SECRET, or key_secret_file"
        ),
        "epd.yaml:9: host must be a value, or a list of values",
        "epd.yaml:10: config is unknown",
        "epd.yaml:11: zzz is unknown",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_items: yes", "epd.yaml:1: max_items should be a valid integer"),
        ("port: 1:30", "epd.yaml:1: port should be a valid integer"),
        ("decode_media: no", "epd.yaml:1: decode_media should be 'metadata' or 'raw'"),
        ("encode_timeout_s: .inf", "epd.yaml:1: encode_timeout_s should be a"),
        ("allow_http_media: 3", "epd.yaml:1: allow_http_media should be a valid boolean"),
        ("max_items: [1, 2]", "epd.yaml:1: max_items should be a valid integer"),
        ("ec_store: [[a]]", "epd.yaml:1: an item of ec_store must be a value"),
        ("host: !!python/name:os.system x", "epd.yaml:1: host has the tag"),
        ("- max_items", "epd.yaml:1: must be lines"),
        ("? [a]\n: b", "epd.yaml:1: the name of a setting must be a word"),
        ("a: 'b", "epd.yaml:1: "),
        ("a: b\n---\nc: d", "epd.yaml:2: "),
        ("<<: {max_items: 3}", "epd.yaml:1: << is unknown"),
        ("\0", "epd.yaml: "),
        ("[" * 10_000, "epd.yaml"),
        (f"host: {'a' * 1024**2}", "--config "),
    ],
)
def test_errors_of_a_configuration_file(text: str, reason: str, tmp_path: Path) -> None:
    reasons = wrong(text, tmp_path)

    assert any(one.startswith(reason) for one in reasons), reasons


@settings(deadline=None)
@given(st.text())
def test_any_text_is_a_file_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        load({**INSTANCES, "config": str(path)})
    except ConfigInvalid as invalid:
        assert invalid.reasons


def test_words_for_true_and_false_are_those_of_the_environment(tmp_path: Path) -> None:
    text = "media_fetch: proxy\nallow_http_media: on\ntrust_request_mm_kwargs: 'no'"

    config = loaded(text, tmp_path).config

    assert (config.allow_http_media, config.trust_request_mm_kwargs) == (True, False)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"no\.yaml: No such file"):
        load({**INSTANCES, "config": str(tmp_path / "no.yaml")})


def test_settings_of_an_unreadable_file_are_not_called_missing(tmp_path: Path) -> None:
    assert wrong("max_itms: 3", tmp_path, encode_servers_urls="", decode_servers_urls="") == [
        "epd.yaml:1: max_itms is unknown; is max_items meant?"
    ]


def test_an_unknown_variable_is_a_warning_that_names_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPD_MAX_ITEM", "3")
    monkeypatch.setenv("EPD_UP_TOPOLOGY", "1e1pd")

    loaded = load(INSTANCES)

    assert loaded.unknown == ("EPD_MAX_ITEM is unknown; is EPD_MAX_ITEMS meant?",)
    assert loaded.config.max_items == ProxyConfig.model_fields["max_items"].default


def test_service_variables_of_kubernetes_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("EPD", "EPD_ENCODE", "EPD_REDIS_MASTER"):
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:8000")
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{service}_SERVICE_PORT", "8000")
        monkeypatch.setenv(f"{service}_SERVICE_PORT_HTTP", "8000")
        monkeypatch.setenv(f"{service}_PORT_8000_TCP", "tcp://10.0.0.1:8000")
        monkeypatch.setenv(f"{service}_PORT_8000_TCP_ADDR", "10.0.0.1")

    assert load(INSTANCES).config.port == 8000


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_PORT", "http")

    with pytest.raises(ConfigInvalid, match=r"^EPD_PORT should be a valid integer"):
        load(INSTANCES)


def test_a_variable_that_is_not_utf_8_is_reported_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EPD_KEY_SECRET", "OPENAI_API_KEY", "EPD_API_KEYS_FILE"):
        monkeypatch.setitem(os.environb, name.encode(), SECRET.encode() + b"\xff")

    assert sorted(wrong("", tmp_path, host="\udcff")) == [
        "--host is not UTF-8",
        "EPD_API_KEYS_FILE is not UTF-8",
        "EPD_KEY_SECRET is not UTF-8",
        "OPENAI_API_KEY is not UTF-8",
    ]


def test_a_secret_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")

    by_file = loaded(f"key_secret_file: {secret}", tmp_path)
    monkeypatch.setenv("EPD_KEY_SECRET_FILE", str(secret))
    by_variable = load(INSTANCES)

    for made in (by_file, by_variable):
        assert made.config.key_secret is not None
        assert made.config.key_secret.get_secret_value() == SECRET


def test_a_secret_has_precedence_over_its_file_at_a_lower_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADMIN_API_KEY", SECRET)

    made = loaded("admin_api_key_file: /nowhere", tmp_path)

    assert made.config.admin_api_key is not None
    assert made.config.admin_api_key.get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\xff", "is not UTF-8 text"),
        (None, "No such file"),
        (b"short", "at least 16"),
    ],
)
def test_errors_of_a_secret_file(content: bytes | None, reason: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)

    [said] = wrong(f"key_secret_file: {secret}", tmp_path)

    assert said.startswith("epd.yaml:1: key_secret_file ")
    assert reason in said


def test_a_secret_and_its_file_from_one_source_are_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPD_KEY_SECRET", SECRET)
    monkeypatch.setenv("EPD_KEY_SECRET_FILE", "/nowhere")

    with pytest.raises(ConfigInvalid, match="EPD_KEY_SECRET and EPD_KEY_SECRET_FILE exclude each"):
        load(INSTANCES)


def test_every_secret_may_be_in_a_file() -> None:
    assert {f"{name}_file" for name in SECRETS} <= set(FIELDS)


def test_a_shown_configuration_can_be_read_back_and_states_its_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_MAX_QUEUE", "7")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    made = loaded(f"max_items: 3\nkey_secret_file: {secret}", tmp_path, port="0")
    monkeypatch.delenv("EPD_MAX_QUEUE")

    shown = as_yaml(made)
    path = tmp_path / "shown.yaml"
    path.write_text(shown)

    assert load({"config": str(path)}).config == made.config
    for line in (
        "port: 0  # flag --port",
        "max_queue: 7  # environment EPD_MAX_QUEUE",
        f"max_items: 3  # file {tmp_path}/epd.yaml:1",
        "workers: 1  # default",
    ):
        assert line in shown.splitlines()


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(f"EPD_{name.upper()}", "SECRET" * 3)
    monkeypatch.setenv("EPD_EC_STORE", "redis://:SECRET@h")

    made = load(INSTANCES)

    shown = as_yaml(made)
    assert "SECRET" * 2 not in shown
    assert ":SECRET@" not in shown
    assert '# key_secret: "**********"  # environment EPD_KEY_SECRET' in shown.splitlines()
    assert yaml.safe_load(shown)["port"] == 8000


def test_the_example_is_a_configuration() -> None:
    made = load({"config": str(EXAMPLE)})

    assert set(made.settings) >= {"encode_servers_urls", "decode_servers_urls", "config"}


def test_an_unknown_flag_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="epd serve")
    parser.add_argument(flag_of("max_items"))

    with pytest.raises(SystemExit):
        parser.parse_args(["--max-itmes=3"])

    assert "unrecognized arguments: --max-itmes=3; is --max-items meant?" in capsys.readouterr().err


def parsed(*words: str) -> dict[str, str]:
    parser = Parser(prog="epd serve")
    add_flags(parser)
    return vars(parser.parse_args(words))


def test_flags_of_vllms_example_proxy_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--probe-interval 2 --probe-timeout 3 --fail-threshold 4 --no-rewrite --log-requests"

    config = load({**INSTANCES, **parsed(*flags.split())}).config

    assert (config.probe_interval_s, config.health_timeout_s, config.eject_after) == (2, 3, 4)
    assert (config.decode_media, config.log_level) == ("raw", "debug")
    assert capsys.readouterr().err == ""


def test_weights_are_of_instances_that_are_named() -> None:
    urls = {"encode_servers_urls": "http://e:1,http://f:1", "discover_prefill_decode": "d:2"}
    config = load({**urls, "instance_weights": "http://E:1/=2, d:2=0"}).config

    assert [one.weight for one in config.instances] == [2.0, 1.0]
    assert [one.weight for one in config.discovered_instances] == [0.0]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("http://e:1", "is not URL=WEIGHT"),
        ("http://e:1=", "is not URL=WEIGHT"),
        ("http://e:1=much", "is not URL=WEIGHT"),
        ("http://e:1=-1", "a weight is 0, or from 0.001 to 1000"),
        ("http://e:1=nan", "a weight is 0, or from"),
        ("http://e:1=1e9", "a weight is 0, or from"),
        ("http://e:1=1,http://e:1/=2", "'http://e:1' is named twice"),
        ("http://other:1=2", "names 'http://other:1', which no other flag names"),
        ("http://u:p@e:1=2", "without a user and a password"),
        ("http://u:secret@e:1=x", "--instance-weights is not URL=WEIGHT, such as"),
    ],
)
def test_a_weight_that_cannot_be_is_refused(weights: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(says)):
        load({**INSTANCES, "instance_weights": weights})


@pytest.mark.parametrize("name", ["", "x y", "x:", "x" * 65])
def test_a_header_of_sessions_has_a_name_of_http(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="--session-header"):
        load({**INSTANCES, "session_header": name})


def test_settings_without_effect_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--evicted-ttl", "900", "--decode-retries=2"]

    assert parsed(*flags) == {}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["epd", "serve:", "warning:", "--evicted-ttl"],
        ["epd", "serve:", "warning:", "--decode-retries"],
    ]


URLS = {"encode_servers_urls": "http://e:1", "decode_servers_urls": "http://d0:1,http://d1:1"}
ZMQ = "tcp://d0:1,tcp://d0:2,tcp://d1:1,tcp://d1:2"


@pytest.mark.parametrize("prefill", [{}, {"prefill_servers_urls": "disable"}])
def test_a_script_for_mooncake_written_for_vllms_example_runs(prefill: dict[str, str]) -> None:
    flags = parsed("--ec-consumer-zmq-addrs", ZMQ, "--ec-consumer-dp-size", "2")

    config = load({**URLS, **prefill, **flags}).config

    assert config.ec_transfer == "mooncake"
    first, second = (one for one in config.instances if one.role is Role.PREFILL_DECODE)
    assert first.ec_zmq_addrs == ("tcp://d0:1", "tcp://d0:2")
    assert second.ec_zmq_addrs == ("tcp://d1:1", "tcp://d1:2")


@pytest.mark.parametrize("none", ["", "none", "disable"])
def test_missing_addresses_mean_no_transfer(none: str) -> None:
    assert load({**URLS, "ec_consumer_zmq_addrs": none}).config.ec_transfer == "store"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ec_consumer_zmq_addrs": "tcp://d0:1"}, r"2 \(2 instances x 1 ranks\), not 1"),
        ({"ec_consumer_zmq_addrs": ZMQ, "ec_consumer_dp_size": "3"}, r"6 \(.*\), not 4"),
        ({"ec_transfer": "mooncake"}, "not 0"),
        ({"ec_transfer": "mooncake", "prefill_servers_urls": "http://p:1"}, "E\\+PD"),
        ({"ec_consumer_zmq_addrs": ZMQ, "prefill_servers_urls": "http://p:1"}, "E\\+PD"),
        ({"ec_consumer_zmq_addrs": ZMQ, "ec_transfer": "store"}, "needs --ec-transfer mooncake"),
        ({"ec_consumer_zmq_addrs": "d0:1,d1:1"}, "not an address such as tcp"),
        ({"ec_consumer_zmq_addrs": "tcp://d0:1/x,tcp://d1:1"}, "not an address such as tcp"),
        ({"ec_consumer_zmq_addrs": "tcp://u@d0:1,tcp://d1:1"}, "not an address such as tcp"),
        ({"ec_consumer_zmq_addrs": "tcp://d0,tcp://d1:1"}, "not an address such as tcp"),
        ({"ec_transfer": "nixl", "ec_store": "file:///tmp/x"}, "--ec-store needs"),
        ({"ec_transfer": "mooncake", "ec_store": "file:///tmp/x"}, "--ec-store needs"),
        (
            {"ec_consumer_zmq_addrs": ZMQ, "discover_prefill_decode": "pd:1"},
            "does not give the addresses that receive encoder outputs",
        ),
        ({"ec_transfer": "post"}, "post|store"),
    ],
)
def test_transfers_of_encoder_outputs_that_cannot_work_are_refused(
    flags: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        load({**URLS, **flags})


@pytest.mark.parametrize(
    ("name", "metavar"),
    [
        ("conversation_ttl", "SECONDS"),
        ("conversation_store", "URL"),
        ("ec_store", "URL"),
        ("registration_store", "URL"),
        ("allowed_local_media_path", "FOLDER"),
        ("upstream_ca_file", "FILE"),
        ("host", "ADDRESS"),
        ("tenant_max_requests", "N"),
        ("decode_hosts", "HOSTS"),
        ("discover_prefill_decode", "HOST:PORT"),
    ],
)
def test_help_has_a_placeholder_for_each_value(name: str, metavar: str) -> None:
    assert metavar_of(name) == metavar


@pytest.mark.parametrize("transfer", ["nixl-push", "mooncake", "offloading", "none"])
def test_conversations_are_kept_apart_only_where_prefill_can_read_them(transfer: str) -> None:
    store = {**INSTANCES, "conversation_store": "redis://cache:6379"}
    wanted = f"--conversation-store needs --kv-transfer nixl or multi: with {transfer}, prefill"
    with pytest.raises(ConfigInvalid, match=wanted):
        load({**store, "kv_transfer": transfer})

    for able in ("nixl", "multi"):
        assert load({**store, "kv_transfer": able}).config.conversation_store


@pytest.mark.parametrize("interval", ["1e-9", "0.01"])
def test_instances_are_not_asked_without_a_pause(interval: str) -> None:
    with pytest.raises(ConfigInvalid, match="--load-interval-s must be 0 or"):
        load({**INSTANCES, "load_interval_s": interval})


def test_each_setting_has_a_description_for_its_flag() -> None:
    assert [name for name, field in FIELDS.items() if not field.description] == []


def test_a_configuration_cannot_be_changed() -> None:
    frozen = load(INSTANCES).config

    for name in ProxyConfig.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(frozen, name, 1)
        hash(getattr(frozen, name))  # nor a value of it
