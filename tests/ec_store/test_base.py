"""Interface of every store."""

import pytest

from ec_store import Store

REQUIRED = sorted(Store.__abstractmethods__)


def _backend(*methods: str) -> type[Store]:
    return type("Backend", (Store,), {name: lambda *_: None for name in methods})


def test_a_backend_with_all_required_methods_can_be_created() -> None:
    assert {"claim", "get", "put"} < set(REQUIRED)
    assert isinstance(_backend(*REQUIRED)(), Store)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_backend_without_a_required_method_cannot_be_created(missing: str) -> None:
    backend = _backend(*(name for name in REQUIRED if name != missing))

    with pytest.raises(TypeError, match=rf"abstract method '?{missing}\b"):
        backend()
