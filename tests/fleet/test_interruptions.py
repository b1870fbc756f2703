import os
import signal
import threading

import pytest

from epd.fleet.interruptions import interrupted_later


def test_an_interruption_comes_when_the_work_is_done() -> None:
    done = []

    def work() -> None:
        with interrupted_later():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        restored = signal.signal(signal.SIGINT, before)

    assert done
    assert restored is signal.default_int_handler


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupted_later():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failure_is_not_lost_to_an_interruption_that_did_not_come() -> None:
    with pytest.raises(ValueError, match="why"), interrupted_later():
        raise ValueError("why")


def test_another_thread_may_start_what_it_likes() -> None:
    ran = []

    def work() -> None:
        with interrupted_later():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert ran
