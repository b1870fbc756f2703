"""A master of Mooncake and tiers on it, over TCP on the loopback."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ec_store.mooncake.tier import MooncakeTier
from tests.ec_store.mooncake.tiers import opened_tier
from tests.support.mooncake_server import MooncakeMaster, environment, why_not

OpenTier = Callable[[str], MooncakeTier]


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def library(installed: None) -> Iterator[None]:
    """Let child processes of this one import Mooncake."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        yield


@pytest.fixture(scope="module")
def master(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture
def open_tier(library: None) -> Iterator[OpenTier]:
    """Return a function that opens a tier, and waits until its processes are ready."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(opened_tier(url))
