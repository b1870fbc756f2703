"""Messages of workers to their scheduler."""

import time

import pytest

from ec_store.engine.backchannel import Receiver, Sender


def test_messages_of_other_users_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"users-{time.monotonic_ns()}"
    receiver, sender = Receiver(name), Sender(name)
    assert sender.send({"counts": {}})
    assert list(receiver.drain()) == [{"counts": {}}]
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert sender.send({"counts": {}})

    assert list(receiver.drain()) == []
    receiver.close()
    assert not sender.send({"counts": {}})
    sender.close()


def test_an_invalid_message_is_skipped() -> None:
    name = f"malformed-{time.monotonic_ns()}"
    receiver, sender = Receiver(name), Sender(name)
    for sent in (b"{", b"\xff", b"[]"):
        sender._socket.sendto(sent, sender._address)  # noqa: SLF001
    assert sender.send({"counts": {}})

    assert list(receiver.drain()) == [{"counts": {}}]
    receiver.close()
    sender.close()
