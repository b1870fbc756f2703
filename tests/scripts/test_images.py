"""The script that builds and starts the images uses those of compose.yaml, confined as there."""

from epd.tools.up.plan import plan_fleet
from epd.tools.up.settings import FleetSettings
from scripts.images.__main__ import IMAGES
from scripts.images.programs import USER
from scripts.images.services import ENVIRONMENT, STORE, names, service
from tests.deploy.tools import DEPLOY, load

SERVICES = load(DEPLOY / "compose.yaml")["services"]
CONFINED = ("read_only", "cap_drop", "security_opt")


def test_every_service_with_an_image_of_this_project_is_started() -> None:
    built = {name: each["image"] for name, each in SERVICES.items() if "build" in each}

    assert set(names(engines=False)) == set(built)
    assert set(built.values()) | {"epd-engine"} == set(IMAGES)


def test_engines_are_confined_like_the_store_and_have_the_proxy_s_addresses() -> None:
    settings = FleetSettings(model="org/model", topology="1e1pd", device="cpu")
    engines = plan_fleet(settings, {}, STORE, dry_run=True).engines

    for engine, name in zip(engines, ("ENCODE_URLS", "DECODE_URLS"), strict=True):
        started = service(engine)
        flags = started["command"]
        assert {key: started[key] for key in CONFINED} == {
            key: SERVICES["store"][key] for key in CONFINED
        }
        assert started["user"] == f"{USER}:{USER}"
        assert flags[:2] == ["serve", "/model"]
        assert flags[flags.index("--host") + 1] == "0.0.0.0"  # noqa: S104
        assert ENVIRONMENT[name].endswith(f":{flags[flags.index('--port') + 1]}")
        assert f'"store": "{STORE}"' in flags[flags.index("--ec-transfer-config") + 1]
