"""Options and fixtures for all tests."""

import gc
import os
import signal
import ssl
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.models import written

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("untimed"), max_examples=20)
settings.load_profile("untimed")

pytest_plugins = ["ec_store.testing"]

NOT_QUICK = frozenset({"stack", "browser", "models", "redis_cluster", "start_cluster"})
"""Fixtures that start engines, a browser or a Redis Cluster, or build models."""


TOGETHER = (
    "tests/ec_store/vllm_connector/",
    "tests/vllm_wire/",
    "tests/deploy/test_engines.py",
    "tests/tools/up/test_vllm_flags.py",
)
"""Tests that run in one process. To import vLLM takes 20 s of CPU time."""

LONGEST = (
    *TOGETHER,
    "tests/deploy/test_scenario.py",
    "tests/faults/test_chaos.py",
    "tests/security/test_openapi.py",
    "tests/tools/bench/",
    "tests/scripts/overhead/",
    "tests/tools/up/",
    "tests/proxy/test_workers.py",
    "tests/ui/test_page.py",
)
"""Files that take longest. They start first, so that no process waits for them at the end."""


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc]  # the base class is untyped
    """Distribution of tests over processes: a file runs in one, and so do all of `TOGETHER`.

    A fixture of a module is then made once.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "vllm" if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WholeFiles:
    """Return the distribution for `pytest -n`."""
    config.option.loadscopereorder = False  # the order is that of `LONGEST`
    return WholeFiles(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Restore the default handling of SIGHUP, which `nohup` sets to ignore; trust less."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _trust_one_authority(config)


def _trust_one_authority(config: pytest.Config) -> None:
    """Have only one of the system's certificate authorities loaded in this run.

    Every proxy and every process of a test would load them all, which takes most of the CPU time
    in which a test starts its proxy.
    """
    for certificate in ssl.create_default_context().get_ca_certs(binary_form=True)[:1]:
        folder = TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        file = Path(folder.name) / "authority.pem"
        file.write_text(ssl.DER_cert_to_PEM_cert(certificate))
        os.environ["SSL_CERT_FILE"] = str(file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the tier that its fixtures need, and sort by `LONGEST`."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        if NOT_QUICK.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("full")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, and exclude them from later ones.

    They take a quarter of the time to collect; a later one that a test requests, half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def models() -> Path:
    """Return the directory with the tiny models that most tests use."""
    return written()
