"""Clients with API keys."""

ALICE, ALICE_2, BOB = "alice-key-0123456789", "alice-key-9876543210", "bob-key-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
