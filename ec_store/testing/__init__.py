"""Contracts that a backend of the store is tested with, by pytest and hypothesis.

Name this package in the `conftest.py` at the root of the tests, and subclass a contract:

    pytest_plugins = ["ec_store.testing"]

    class TestMine(StoreContract, ClaimsContract): ...

`stores` has the contract of a store, `claims` that of its claims, and `tiers` that of a tier behind
the memory of a host. Each module names the fixtures that the subclass defines.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.stores", f"{__name__}.claims", f"{__name__}.tiers")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the contracts' tests."""
    config.addinivalue_line("markers", "fault(number): row of docs/faults.md that the test shows")
    config.addinivalue_line("markers", "security(id): row of SECURITY.md that the test shows")
