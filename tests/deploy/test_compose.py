"""compose.yaml and the images match the proxy and each other."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from ec_store.__main__ import make_parser
from ec_store.arena.url import arena_options
from epd.config.flags import FIELDS
from epd.config.load import load as load_config
from tests.deploy.tools import DEPLOY, load, load_all
from tests.support.fleet import Fleet, Launch
from tests.support.redis_server import binary

COMPOSE = load(DEPLOY / "compose.yaml")
SERVICES = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
EXAMPLE = (DEPLOY / "compose.env.example").read_text()
SECRET = "0123456789abcdef" * 2
VARIABLE = re.compile(r"\$\{(\w+)")


def test_the_compose_file_fits_the_specification() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run(
        [sys.executable, "-m", *command, str(DEPLOY / "compose.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout


def test_all_mounted_and_built_files_exist() -> None:
    for service in SERVICES.values():
        for source, *_ in (volume.split(":") for volume in service.get("volumes", ())):
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), source
        if "build" in service:
            build = service["build"]
            assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        assert set(service.get("depends_on", ())) <= set(SERVICES)
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])


def test_the_example_has_every_variable_and_no_other() -> None:
    used = set(VARIABLE.findall((DEPLOY / "compose.yaml").read_text()))
    used.add(COMPOSE["secrets"]["epd-admin-key"]["environment"])
    named = set(re.findall(r"^(?:# )?([A-Z_]+)=", EXAMPLE, re.MULTILINE))

    assert named == used


def filled(value: object) -> str:
    """Return the value with compose's variables replaced by the default or a required value."""
    urls = {"ENCODE_URLS": "http://e:1", "DECODE_URLS": "http://d:1"}

    def one(found: re.Match[str]) -> str:
        return urls.get(found["name"], SECRET) if found["must"] else found["default"]

    return re.sub(
        r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*)|(?P<must>:\?)[^}]*)\}", one, str(value)
    )


def test_the_proxy_takes_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"EPD_{name.upper()}" for name in FIELDS}
    for name, value in SERVICES["proxy"]["environment"].items():
        assert name in known | {"OPENAI_API_KEY", "EC_STORE_REDIS_PASSWORD"}
        monkeypatch.setenv(name, filled(value))
    config = load_config({}).config

    assert config.prefill_servers_urls == ()
    assert config.admin_api_key is not None
    assert config.key_secret is None
    grace_s = int(SERVICES["proxy"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.drain_delay_s + config.drain_timeout_s + 5
    assert SERVICES["proxy"]["ports"][0].endswith(f":{config.port}")


STORE = SERVICES["store"]


def test_the_memory_has_one_socket_for_all_and_a_limit_above_its_size() -> None:
    """The overhead is that of docs/guides/host-memory.md, for 150,000 entries."""
    args = make_parser().parse_args([filled(word) for word in STORE["command"]])
    served = arena_options(args.url)
    limit = int(filled(STORE["mem_limit"]).removesuffix("m")) * 2**20
    [volume], [proxy_volume] = STORE["volumes"], SERVICES["proxy"]["volumes"]
    [folder] = re.findall(
        r"^RUN install -d -o 10001 -g 10001 -m 0750 (\S+)$", DOCKERFILE, re.MULTILINE
    )

    assert filled(SERVICES["proxy"]["environment"]["EPD_EC_STORE"]) == f"shm://{served.path}"
    assert volume == f"store:{folder}" == proxy_volume.removesuffix(":ro")
    assert served.path.startswith(f"{folder}/")
    assert served.mode == 0o660
    assert limit >= served.max_bytes * 1.01 + 256 * 2**20 + 150_000 * 2**10
    assert STORE["memswap_limit"] == STORE["mem_limit"]
    assert STORE["build"]["target"] == "store"
    assert f":{args.port}/health" in STORE["healthcheck"]["test"][-1]


def test_redis_starts_only_for_its_profile_and_with_a_password() -> None:
    command = filled(SERVICES["redis"]["command"][2]).replace("$$", "$")
    ran = subprocess.run(
        ["/bin/sh", "-c", command],
        env={"PATH": "/none", "REDISCLI_AUTH": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert SERVICES["redis"]["profiles"] == ["redis"]
    assert ran.returncode != 0
    assert "set REDIS_PASSWORD" in ran.stderr


KUBERNETES_REDIS = next(
    one for one in load_all(DEPLOY / "kubernetes" / "redis.yaml") if one["kind"] == "Deployment"
)["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    "command",
    [
        filled(SERVICES["redis"]["command"][2]).replace("$$", "$"),
        KUBERNETES_REDIS["command"][2],
    ],
    ids=["compose", "kubernetes"],
)
def test_redis_reads_its_password_from_standard_input(tmp_path: Path, command: str) -> None:
    config, socket = tmp_path / "redis.conf", tmp_path / "socket"
    config.write_text(f"port 0\nunixsocket {socket}\n")
    command = command.replace("docker-entrypoint.sh redis-server", "redis-server")
    command = command.replace("redis-server", binary()).replace(
        "/etc/redis/redis.conf", str(config)
    )
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={"REDISCLI_AUTH": SECRET},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert any("eady to accept connections" in line for line in server.stdout)
            with redis.Redis(unix_socket_path=str(socket), password=SECRET) as client:
                assert client.ping()
            with (
                redis.Redis(unix_socket_path=str(socket)) as client,
                pytest.raises(redis.AuthenticationError),
            ):
                client.ping()
        finally:
            server.terminate()


def test_prometheus_key_is_mounted_where_its_configuration_reads_it() -> None:
    [proxy, _, store] = load(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    path = Path(proxy["authorization"]["credentials_file"])

    assert store["authorization"] == proxy["authorization"]
    assert store["static_configs"] == [{"targets": ["store:8100"]}]
    assert STORE["environment"]["EC_STORE_API_KEY"] == "${EPD_ADMIN_API_KEY}"

    assert path.parent == Path("/run/secrets")
    assert SERVICES["prometheus"]["secrets"] == [path.name]
    assert proxy["static_configs"] == [{"targets": [f"proxy:{FIELDS['port'].default}"]}]


def test_ports_are_bound_to_loopback_by_default() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    loopback = re.compile(r"127\.0\.0\.1:|\$\{\w+_BIND:-127\.0\.0\.1\}:")

    assert ports
    assert [port for port in ports if not loopback.match(port)] == []


def stages(dockerfile: str) -> dict[str, str]:
    """Return the instructions of each stage, by its name; the last is also the default, ""."""
    instructions = re.sub(r"^#.*$", "", dockerfile, flags=re.MULTILINE)
    [_, *parts] = re.split(r"^FROM ", instructions, flags=re.MULTILINE)
    named = {part.split("\n")[0].rpartition(" AS ")[2]: part for part in parts}
    return {**named, "": parts[-1]}


@pytest.mark.security("S23")
def test_the_images_of_the_proxy_and_the_store_run_as_an_unprivileged_user() -> None:
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    found = stages(DOCKERFILE)

    assert int(user) >= 10000
    assert "USER" in found["runtime"]
    assert found["store"].startswith("runtime ")
    assert found["proxy"].startswith("runtime ")
    assert found[""] == found["proxy"]
    assert "vllm" not in "".join(found.values())


def test_images_install_the_distribution_that_they_need_and_no_other() -> None:
    """A wheel is named by its file: a name alone would be looked up in an index."""
    found = stages(DOCKERFILE)
    engine = stages((DEPLOY / "engine.Dockerfile").read_text())
    packages = {
        stage: re.findall(r"\b(ec_store|epd_proxy)-\*\.whl", text)
        for stage, text in found.items()
        if "pip install" in text
    }

    assert packages == {"store-packages": ["ec_store"], "proxy-packages": ["epd_proxy"]}
    assert found["proxy-packages"].startswith("store-packages ")
    assert "COPY --from=store-packages" in found["store"]
    assert "COPY --from=proxy-packages" in found["proxy"]
    assert re.findall(r"\b\w+-\*\.whl", engine[""]) == ["ec_store-*.whl"]
    assert "COPY ec_store /src" in engine["wheel"]


@pytest.mark.parametrize("name", ["Dockerfile", "engine.Dockerfile"])
def test_an_image_is_made_of_files_that_are_sent_to_the_builder(name: str) -> None:
    allowed = set(
        re.findall(r"^!(.+)$", (DEPLOY / f"{name}.dockerignore").read_text(), re.MULTILINE)
    )
    copied = {
        file
        for line in re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / name).read_text(), re.MULTILINE)
        for file in line.split()[:-1]
    }

    assert copied in ({"."}, allowed)
    assert all((DEPLOY.parent / file).exists() for file in allowed)


async def health_check(url: str) -> int | None:
    """Run the image's health check against this proxy; return its exit code."""
    [command] = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    port = url.rpartition(":")[2]
    python, *words = json.loads(command.replace(":8000/", f":{port}/"))
    assert python == "python"
    assert port in words[-1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait()


async def test_the_health_check_succeeds_while_requests_can_be_sent(launch: Launch) -> None:
    async with launch(probe_interval_s=0.05) as fleet:
        assert await health_check(fleet.url) == 0

        fleet.d.healthy = False
        async with asyncio.timeout(30):
            while await status(fleet) != 503:  # noqa: ASYNC110 - the proxy sets no event
                await asyncio.sleep(0.05)
        assert await health_check(fleet.url) == 1


async def status(fleet: Fleet) -> int:
    async with fleet.http.get(f"{fleet.url}/ready") as reply:
        return reply.status
