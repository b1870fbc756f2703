"""The plan of `epd up`: which servers it starts, as values."""

import json
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_store.arena import memory
from ec_store.arena.url import arena_options
from epd.routing.instances import Role
from epd.routing.urls import named_events_address
from epd.running_proxy import fleet_folder
from epd.tools.up.devices import LETTERS, assign, parse_gpus, parse_instances
from epd.tools.up.engine import Engine, FleetServer
from epd.tools.up.host_memory import memory_url, private_folder
from epd.tools.up.plan import FleetPlan, plan_fleet, url_of
from epd.tools.up.platforms import CPU, CUDA, XPU, detect_platform
from epd.tools.up.settings import FleetSettings
from epd.tools.up.topology import Topology
from tests.examples import scaled
from tests.support.own_sockets import use_own_sockets

STORE = "file:///ec"
TWO = MappingProxyType({"CUDA_VISIBLE_DEVICES": "0,1"})
device = st.from_regex(r"[A-Za-z0-9_./-]{1,12}", fullmatch=True)
instance = st.lists(device, min_size=1, max_size=3, unique=True).map(tuple)
instances = st.lists(instance, min_size=1, max_size=3).map(tuple)


def written(named: Mapping[Role, Sequence[Sequence[str]]]) -> str:
    letters = {role: letters for letters, role in LETTERS.items()}
    return ",".join(
        f"{letters[role]}={':'.join(map('+'.join, several))}" for role, several in named.items()
    )


@given(st.dictionaries(st.sampled_from(Role), instances, min_size=1))
def test_named_devices_are_read_as_written(named: Mapping[Role, Any]) -> None:
    assert parse_gpus(written(named)) == named


def test_a_stage_may_be_named_once_for_each_instance() -> None:
    assert parse_gpus("e=0,pd=2+3, e=1") == parse_gpus("e=0:1,PD=2+3")


@given(st.text(max_size=20))
def test_an_invalid_list_of_devices_is_a_value_error(text: str) -> None:
    for read in (parse_gpus, parse_instances):
        try:
            read(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize("text", ["", "e", "e=", "x=0", "e=0+", "e=:1", "e=0 1", "e=0+0", "e=0;1"])
def test_an_invalid_list_of_devices_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        parse_gpus(text)


@given(st.integers(0, 99), st.integers(1, 99), st.integers(0, 99))
def test_topologies_are_read_as_written(encode: int, prefill: int, decode: int) -> None:
    name = f"{encode}e" if encode else ""
    name += f"{prefill}p{decode}d" if decode else f"{prefill}pd"
    roles = Topology.parse(name).roles
    assert Topology.parse(name.upper()) == Topology(roles)
    if not decode:
        assert Topology.parse(name.replace("pd", "epd")) == Topology(roles, local=True)
    counts = {role: roles.count(role) for role in Role}

    assert counts[Role.ENCODE] == encode
    assert [counts[Role.PREFILL], counts[Role.DECODE]] == ([prefill, decode] if decode else [0, 0])
    assert counts[Role.PREFILL_DECODE] == (0 if decode else prefill)


ROLES = Topology.parse("2e1p1d").roles


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (None, "0123", "0 1 2 3"),
        (None, "01", "0 1 0 1"),
        ("p=1", "0123", "0 2 1 3"),
        ("d=2+3", "0123", "0 0 1 2+3"),
        (None, "012", "0 0 1 2"),
        ("p=0,d=1", "0123", "2 3 0 1"),
        ("e=0:0,p=1,d=2", "", "0 0 1 2"),
        ("p=0", "0", "0 0 0 0"),
    ],
)
def test_instances_get_the_named_device_or_a_free_one(
    gpus: str | None, visible: str, expected: str
) -> None:
    given_devices = assign(ROLES, parse_gpus(gpus) if gpus else {}, visible)

    assert " ".join(map("+".join, given_devices)) == expected


@pytest.mark.parametrize(
    ("topology", "visible", "expected"),
    [
        ("2e1pd", "01", ["0", "0", "1"]),
        ("1e1pd", "0123", ["0", "1"]),
        ("1e1p1d", "01", ["0", "1", "0"]),
        ("1e1pd", "0", ["0", "0"]),
        ("2pd", "01", ["0", "1"]),
    ],
)
def test_encode_instances_share_what_the_others_leave(
    topology: str, visible: str, expected: list[str]
) -> None:
    assert [*map("+".join, assign(Topology.parse(topology).roles, {}, visible))] == expected


@pytest.mark.parametrize("gpus", ["e=0", "p=0:1", "pd=0"])
def test_the_number_of_devices_equals_that_of_instances(gpus: str) -> None:
    with pytest.raises(ValueError, match="the topology has"):
        assign(ROLES, parse_gpus(gpus), "01")


def test_devices_are_those_of_the_machine_or_of_the_environment(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()

    assert CUDA.visible_devices({}, tmp_path) == ("0", "1")
    assert CUDA.visible_devices({"CUDA_VISIBLE_DEVICES": "5, 7"}, tmp_path) == ("5", "7")
    assert CUDA.visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert XPU.visible_devices({}, tmp_path) == ("0",)
    assert CPU.visible_devices({}, tmp_path) == ()
    assert detect_platform({}, tmp_path) is CUDA
    assert detect_platform({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) is CPU


def plan(
    environ: Mapping[str, str] = TWO, store: str = STORE, cores: int = 1, **values: Any
) -> FleetPlan:
    settings = FleetSettings(**{"model": "a/b", "device": "cuda"} | values)
    return plan_fleet(settings, environ, store, cores=cores)


def given_flags(engine: Engine) -> Mapping[str, str]:
    command = engine.command()
    return dict(zip(command, [*command[1:], ""], strict=True))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_stage_that_the_topology_lacks_gets_no_device(device: Any) -> None:
    with pytest.raises(ValueError, match="names devices of decode, a stage that --topology lacks"):
        FleetSettings(model="m", gpus=parse_gpus("e=0,d=1"), device=device)


NONE = MappingProxyType({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("gpus", [{"gpus": "e=0,pd=1"}, {"gpu_e": "0", "gpu_pd": "1"}])
def test_a_plan_for_named_devices_that_are_not_visible_is_for_cuda(gpus: dict[str, Any]) -> None:
    settings = FleetSettings(model="m", **gpus)
    dry = plan_fleet(settings, NONE, STORE, dry_run=True)

    assert {engine.platform.name for engine in dry.engines} == {"cuda"}
    with pytest.raises(ValueError, match="no NVIDIA device is visible for --gpus"):
        plan_fleet(settings, NONE, STORE)
    cpu = plan_fleet(FleetSettings(model="m"), NONE, STORE, dry_run=True)
    assert {engine.platform.name for engine in cpu.engines} == {"cpu"}


def test_instances_of_a_role_count_up_from_its_port() -> None:
    engines = plan(topology="2e2p1d", device="cpu", encode_port=100, nixl_port=500).engines

    assert [engine.port for engine in engines] == [100, 101, 8300, 8301, 8400]
    assert [engine.side_channel_port for engine in engines] == [0, 0, 500, 510, 520]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 8200}, "port 8200 is assigned to the proxy and to encode-8200"),
        ({"ec_store_port": 8000}, "to the proxy and to the store"),
        ({"topology": "2e1pd", "encode_port": 65535}, "encode-65536: port 65536 is above 65535"),
        ({"topology": "2e1p1d", "prefill_port": 8201}, "to encode-8201 and to prefill-8201"),
        ({"topology": "1e1p1d", "nixl_port": 8300}, "to prefill-8300 and to NIXL of prefill-830"),
    ],
)
def test_no_two_servers_have_one_port(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(device="cpu", **values)


def test_each_stage_is_started_on_its_devices_with_its_flags() -> None:
    encode, prefill, decode = plan(
        topology="1e1p1d",
        gpus="e=0,p=1,d=2+3",
        max_model_len=9,
        vllm_flags="--every one",
        decode_flags="--decode 'two words'",
    ).engines

    assert [engine.environment().get("CUDA_VISIBLE_DEVICES") for engine in (encode, decode)] == [
        "0",
        "2,3",
    ]
    assert prefill.environment() == {
        "CUDA_VISIBLE_DEVICES": "1",
        "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "UCX_TLS": "all",
        "UCX_NET_DEVICES": "all",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    }
    assert given_flags(encode)["--max-num-batched-tokens"] == "16384"
    assert given_flags(encode)["--gpu-memory-utilization"] == "0.01"
    assert "--gpu-memory-utilization" not in given_flags(decode)
    assert given_flags(decode)["--tensor-parallel-size"] == "2"
    assert "--tensor-parallel-size" not in given_flags(prefill)
    assert "--distributed-executor-backend" not in given_flags(prefill)
    eager = ["--enforce-eager" in engine.command() for engine in (encode, prefill, decode)]
    assert eager == [True, True, False]
    assert prefill.command()[-2:] == ("--every", "one")
    assert decode.command()[-4:] == ("--every", "one", "--decode", "two words")
    assert {given_flags(one)["--max-model-len"] for one in (encode, prefill, decode)} == {"9"}


@pytest.mark.parametrize("encode", [0, 1])
def test_servers_that_do_all_stages_read_and_write_the_store(encode: int) -> None:
    fleet = plan(topology=f"{encode}e2epd".removeprefix("0e"), device="cpu")
    servers = fleet.of_roles(Role.PREFILL_DECODE)
    proxy = fleet.servers()[-1].command

    assert len(servers) == 2
    for server in servers:
        config = json.loads(given_flags(server)["--ec-transfer-config"])
        assert config["ec_role"] == "ec_both"
    assert f"--servers-urls={','.join(server.url for server in servers)}" in proxy
    assert not any("decode-servers" in flag for flag in proxy)
    assert fleet.store in proxy


@pytest.mark.parametrize(
    ("topology", "cores", "threads"), [("1e1pd", 16, 8), ("1e1p1d", 2, 1), ("1pd", 2, 2)]
)
def test_instances_on_a_cpu_compute_on_their_share_of_the_cores(
    topology: str, cores: int, threads: int
) -> None:
    engines = plan(cores=cores, topology=topology, device="cpu").engines
    callers = plan({"OMP_NUM_THREADS": "3"}, cores=cores, topology=topology, device="cpu").engines

    assert {engine.environment()["OMP_NUM_THREADS"] for engine in engines} == {str(threads)}
    assert {engine.environment()["OMP_NUM_THREADS"] for engine in callers} == {"3"}
    for engine in plan(cores=cores, topology=topology, device="cuda").engines:
        assert "OMP_NUM_THREADS" not in engine.environment()


@pytest.mark.parametrize(
    ("topology", "device", "cores", "servers"),
    [
        ("1e1pd", "cuda", 16, 4),
        ("1e1p1d", "cuda", 8, 2),
        ("2e1pd", "cuda", 5, 1),
        ("1e1pd", "cuda", 1, 1),
        ("1e1pd", "cpu", 16, 1),
    ],
)
def test_encode_instances_prepare_media_on_their_share_of_the_cores(
    topology: str, device: str, cores: int, servers: int
) -> None:
    engines = plan(cores=cores, topology=topology, device=device).engines
    given = {engine.role: given_flags(engine).get("--api-server-count", "1") for engine in engines}
    tokens = given_flags(engines[0])["--max-num-batched-tokens"]

    assert given.pop(Role.ENCODE) == str(servers)
    assert set(given.values()) == {"1"}
    assert tokens == ("4096" if device == "cpu" else "16384")


def test_several_api_servers_start_whatever_the_callers_environment_allows() -> None:
    lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    encode, consumer = plan({**TWO, **lora}, cores=16).engines

    assert encode.environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    assert lora.keys().isdisjoint(consumer.environment())
    assert lora.keys().isdisjoint(plan(cores=16).engines[0].environment())


def test_processor_on_the_device_is_the_operators_choice_and_spawns_processes() -> None:
    spawns = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    encode, consumer = plan(cores=16).engines
    moved, other = plan(cores=16, encode_flags="--mm-tensor-ipc=torch_shm").engines

    flags = {"--mm-tensor-ipc", "--mm-processor-device", "--media-io-kwargs"}
    assert flags.isdisjoint({*encode.command(), *consumer.command()})
    assert moved.environment() == encode.environment() | spawns
    assert other.environment() == consumer.environment()


@pytest.mark.parametrize("topology", ["2p2d", "1pd"])
def test_plan_without_encode_instances_has_no_encoder_store(topology: str) -> None:
    fleet = plan(topology=topology, device="cpu")
    *engines, proxy = [server.command for server in fleet.servers()]

    assert len(engines) == len(fleet.engines)
    assert not any("--ec-transfer-config" in command for command in engines)
    assert "--encode-servers-urls=" in proxy
    assert "--ec-store" not in proxy
    assert ("--kv-transfer-config" in engines[0]) == (topology == "2p2d")


def kv_configs(**values: Any) -> list[dict[str, Any]]:
    engines = plan(topology="1e1p1d", device="cpu", **values).engines
    return [json.loads(given_flags(one).get("--kv-transfer-config", "{}")) for one in engines]


def test_prefill_and_decode_both_get_the_conversation_flags() -> None:
    _, prefill, decode = kv_configs(bidirectional_kv=True)

    assert prefill["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True}
    assert decode["kv_connector_extra_config"] == {"bidirectional_kv_xfer": True}
    [encode, prefill, decode] = kv_configs(bidirectional_kv=True, kv_recompute_threshold=0)
    assert encode == {}
    for one in (prefill, decode):
        assert one["kv_connector_extra_config"]["kv_recompute_threshold"] == 0
    assert "kv_connector_extra_config" not in kv_configs()[1]


@pytest.mark.parametrize(
    ("topology", "stage"), [("1e1p1d", "prefill"), ("1e2pd", "decode"), ("2pd", "decode")]
)
def test_instances_that_prefill_are_chosen_by_their_events(topology: str, stage: str) -> None:
    fleet = plan(topology=topology, device="cpu", kv_events=True)
    *engines, proxy = fleet.servers()[-len(fleet.engines) - 1 :]
    addresses = {}
    for engine in fleet.engines:
        given = given_flags(engine)
        assert ("--kv-events-config" in given) == (engine.role is not Role.ENCODE)
        if engine.role is not Role.ENCODE:
            config = json.loads(given["--kv-events-config"])
            assert config.items() >= {"enable_kv_cache_events": True, "publisher": "zmq"}.items()
            addresses[engine.url] = config["endpoint"]

    assert len({*addresses.values()}) == len(addresses) <= len(engines)
    flags = proxy.command
    assert flags[flags.index(f"--{stage}-balance") + 1] == "content"
    named = flags[flags.index("--kv-events-addrs") + 1].split(",")
    assert dict(map(named_events_address, named)) == addresses
    assert not any("kv-events" in word for one in plan().servers() for word in one.command)


def waits(fleet: FleetPlan) -> dict[str, str]:
    """Return what the engines wait for, in the order of the servers."""
    engines = {engine.name for engine in fleet.engines}
    return {
        server.name: " ".join(server.after) for server in fleet.servers() if server.name in engines
    }


def test_an_engine_starts_when_its_neighbours_have_their_memory() -> None:
    shared = plan(topology="1e2p1d", gpus="e=0,p=0:1,d=0+1")
    assert waits(shared) == {
        "encode-8200": "",
        "prefill-8300": "encode-8200",
        "prefill-8301": "",
        "decode-8400": "encode-8200 prefill-8300 prefill-8301",
    }


@pytest.mark.parametrize(
    "values",
    [{"gpus": "e=0,p=1,d=2"}, {"device": "cpu"}, {"device": "xpu", "gpus": "e=0,p=1,d=2+3"}],
)
def test_engines_that_share_no_device_start_at_once(values: Mapping[str, Any]) -> None:
    assert set(waits(plan(topology="1e1p1d", **values)).values()) == {""}


def test_encode_instances_of_a_device_start_at_once_and_first() -> None:
    assert [*waits(plan(topology="2e1pd", gpus="e=0:0,pd=0")).values()] == [
        *("", ""),
        "encode-8200 encode-8201",
    ]


@pytest.mark.parametrize(
    "flag", ["--kv-cache-memory-bytes 8000000000", "--kv_cache_memory_bytes=8"]
)
def test_an_engine_with_a_given_size_of_its_kv_cache_measures_nothing(flag: str) -> None:
    fleet = plan(topology="1e1p1d", gpus="e=0,p=0,d=0", decode_flags=flag)

    assert waits(fleet) == {
        "encode-8200": "",
        "decode-8400": "",
        "prefill-8300": "encode-8200 decode-8400",
    }


def test_the_variable_for_devices_is_the_platforms_or_configured() -> None:
    once = {"VLLM_MEDIA_FETCH_MAX_RETRIES": "1"}
    [encode, _] = plan(device="xpu", gpus="e=4,pd=5").engines
    assert encode.environment() == {"ZE_AFFINITY_MASK": "4", **once}
    hip = {**TWO, "HIP_VISIBLE_DEVICES": "4,5"}
    [encode, _] = plan(hip, device_affinity_env="HIP_VISIBLE_DEVICES").engines
    assert encode.environment() == {"HIP_VISIBLE_DEVICES": "4", **once}


def test_variables_of_the_caller_precede_those_of_the_platform() -> None:
    own = {"UCX_TLS": "rc", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}
    [_, prefill, _] = plan({**TWO, **own}, topology="1e1p1d").engines

    assert own.items() <= prefill.environment().items()
    assert prefill.environment()["UCX_NET_DEVICES"] == "all"


def test_a_model_in_a_directory_asks_no_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    assert plan(model=str(tmp_path)).engines[0].environment()["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in plan().engines[0].environment()


def test_plan_has_a_store_service_only_for_a_file_store() -> None:
    assert plan().servers()[0].name == "store"
    assert "store" not in [server.name for server in plan(store="redis://host").servers()]


def test_a_model_directory_is_served_under_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    named = plan(model=f"{folder}/").engines[0]
    other = plan(model=str(folder), served_model_name="other").engines[0]
    hub = plan(model="a/b").engines[0]

    assert [one.settings.served_name for one in (named, other, hub)] == [
        "tiny-model",
        "other",
        None,
    ]


def test_a_store_may_be_named_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FleetSettings(model="m", ec_store="/a b").ec_store == "file:///a%20b?max_bytes=64GiB"
    monkeypatch.setenv("EC_SHARED_STORAGE_PATH", "/ec")
    assert FleetSettings(model="m").ec_store == "file:///ec?max_bytes=64GiB"
    assert FleetSettings(model="m", ec_store="redis://h").ec_store == "redis://h"


def test_requests_are_answered_while_the_proxy_and_one_that_decodes_run() -> None:
    fleet = plan(topology="1e1p2d", device="cpu")
    names = {server.name for server in fleet.servers()}

    assert fleet.missing_role(names) is None
    assert fleet.missing_role({"proxy", "decode-8401"}) is None
    assert fleet.missing_role(names - {"proxy"}) == "The proxy has ended"
    others = {"proxy", "encode-8200", "prefill-8300", "store"}
    assert fleet.missing_role(others) == "No instance that decodes is left"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),  # noqa: S104
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_the_proxy_is_reached_where_it_listens(host: str, url: str) -> None:
    assert url_of(host, 80) == url


words = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    max_size=5,
)
names = st.from_regex(r"EPD_[A-Z]{1,5}", fullmatch=True)


@settings(max_examples=scaled(60))
@given(words, st.dictionaries(names, words.map("-".join), max_size=2))
def test_a_shell_parses_a_servers_line_unchanged(args: list[str], environ: dict[str, str]) -> None:
    """`env` prints the environment, `printf` prints its arguments."""
    printed = ('printf "%s\\0" "$@"; env -0', "bash")
    server = FleetServer("name", "", ("bash", "-c", *printed, "--flag", *args), environ)
    ran = subprocess.run(["bash", "-c", server.shell()], capture_output=True, check=True)  # noqa: S607
    seen = ran.stdout.decode().split("\0")

    assert seen[: 1 + len(args)] == ["--flag", *args]
    assert {f"{name}={value}" for name, value in environ.items()} <= set(seen[1 + len(args) :])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the runtime folder of this user, in a temporary one with a short path."""
    with tempfile.TemporaryDirectory() as folder:
        yield use_own_sockets(Path(folder), monkeypatch)


def test_fleets_of_one_user_have_sockets_of_their_own(runtime: Path) -> None:
    first, second = (memory_url(fleet_folder(port), 2**30) for port in (8000, 8010))

    assert first == f"shm://{runtime}/epd-up-8000/arena.sock?max_bytes=1024MiB"
    assert arena_options(first).max_bytes == 2**30
    assert arena_options(second).path != arena_options(first).path
    assert not runtime.exists()


@pytest.mark.parametrize(
    ("left", "size_mib"),
    [
        (None, 256),
        (0, 256),
        (24 * 2**30 + 1, 3072),
        (3 * 2**30, 256),
        (4 * 2**30, 512),
        (2 * 2**40, 65536),
    ],
)
def test_the_default_memory_is_an_eighth_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, left: int | None, size_mib: int
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: left)

    assert memory_url(Path("/x"), None) == f"shm:///x/arena.sock?max_bytes={size_mib}MiB"


def test_a_memory_has_whole_huge_pages() -> None:
    assert memory_url(Path("/x"), 3 * 2**20 + 1).endswith("max_bytes=4MiB")


def test_a_folder_that_another_user_may_write_to_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fleet_folder(8000)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="another user may"), private_folder(folder):
        pass
    folder.chmod(0o700)
    runtime.chmod(0o777)
    with pytest.raises(PermissionError, match="another user may"), private_folder(folder):
        pass


def test_the_folder_of_a_socket_ends_with_its_server(runtime: Path) -> None:
    folder = fleet_folder(8000)
    address = folder / "arena.sock"
    with private_folder(folder), socket.socket(socket.AF_UNIX) as other:
        assert folder.stat().st_mode & 0o777 == 0o700
        other.bind(str(address))
        other.listen()
        with private_folder(folder):  # a second fleet, which another one keeps from starting
            pass
        assert address.exists()
    assert not folder.exists()
    folder.mkdir()
    address.touch()  # a fleet that was killed has left it
    with private_folder(folder):
        pass
    assert not folder.exists()


def test_instances_wait_for_a_memory_that_the_fleet_serves() -> None:
    served = plan(store="shm:///ec/arena.sock")
    store, *engines, _ = served.servers()

    assert store.command[-4:] == ("serve", "shm:///ec/arena.sock", "--port", "8100")
    assert [server.after for server in engines] == [("store",)] * 2
    assert "# start it when store is ready\n" in engines[0].shell()
    assert {server.name for server in plan().servers() if server.after} == set()
    settings = FleetSettings(model="m", device="cuda")
    running = plan_fleet(settings, TWO, "shm:///ec/arena.sock", store_runs=True)
    assert "store" not in [server.name for server in running.servers()]
    assert 8100 not in running.ports()


def test_only_the_default_store_has_a_size_of_its_own() -> None:
    assert FleetSettings(model="m", ec_store_memory="16GiB").ec_store_memory == 16 * 2**30
    with pytest.raises(ValueError, match="a store URL has max_bytes"):
        FleetSettings(model="m", ec_store="shm:///x", ec_store_memory="16GiB")


def test_requests_use_the_model_name_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setenv("HOME", str(tmp_path))

    for said, model in ((f"{tmp_path}/", f"{tmp_path}/"), ("~/", f"{tmp_path}/")):
        assert plan(model=said).engines[0].command()[4] == model


def test_variables_are_read_as_the_example_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPU_E", "MAX_NUM_SEQS", "DEVICE_AFFINITY_ENV", "LOG_PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("DEVICE_PLATFORM", "XPU")
    settings = FleetSettings(model="a/b")

    assert settings.device == "xpu"
    assert settings.gpu_e is None
    assert settings.device_affinity_env is None
    assert settings.log_path == Path("logs")
