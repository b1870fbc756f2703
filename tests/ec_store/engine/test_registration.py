"""Registration of a namespace: a store that cannot be used, and threads that cannot be started."""

from pathlib import Path

import pytest

from ec_store import open_store
from ec_store.engine.registration import NamespaceRegistration
from tests.ec_store.conftest import NoThreads
from tests.ec_store.waiting import until


def test_a_namespace_is_registered_once_the_store_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    with open_store(f"file://{blocked}/store", lazy=True) as store:
        registration = NamespaceRegistration(store, "tiny", "ns", retry_s=0.05)
        until(lambda: "the encoder store cannot be used" in caplog.text)
        blocked.unlink()
        with open_store(f"file://{blocked}/store") as other:
            until(lambda: other.namespaces() == {"tiny": "ns"})
        registration.close()
    warnings = [line for line in caplog.messages if "cannot be used" in line]
    assert len(warnings) == 1


@pytest.mark.fault(87)
def test_a_namespace_is_registered_once_a_thread_can_be_started(
    tmp_path: Path, no_threads: NoThreads, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [0.0]
    with open_store(f"file://{tmp_path}/store") as store:
        with no_threads():
            registration = NamespaceRegistration(
                store, "tiny", "ns", retry_s=10.0, clock=lambda: now_s[0]
            )
            now_s[0] = 10.0
            registration.start()
        now_s[0] = 19.0
        registration.start()
        assert store.namespaces() == {}

        now_s[0] = 20.0
        registration.start()
        until(lambda: store.namespaces() == {"tiny": "ns"})
        registration.close()
    assert sum("ec-store-register" in line for line in caplog.messages) == 1
