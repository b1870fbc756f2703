"""Request ids are unique, even if the process seeds the random numbers or forks."""

import random
import re
import subprocess
import sys

import epd
from epd.request.request import Request, request_id


def test_request_ids_have_their_length_and_begin_with_the_clients() -> None:
    assert re.fullmatch("[0-9a-f]{32}", request_id(None))
    assert re.fullmatch("mine-[0-9a-f]{8}", request_id("mine"))
    asked = Request(
        "mine", {}, epd.ProxyConfig(encode_servers_urls=(), decode_servers_urls=("http://d:1",))
    )
    assert re.fullmatch("mine:0:[0-9a-f]{6}", asked.child_id())
    assert re.fullmatch("mine:1:[0-9a-f]{6}", asked.child_id())


def test_request_ids_do_not_depend_on_the_global_random_seed() -> None:
    ids = []
    for _ in range(2):
        random.seed(0)
        ids.append(request_id(None))

    assert ids[0] != ids[1]


FORKS = """
import os
from epd.request.request import request_id
child = os.fork()
os.write(1, f"{request_id(None)}\\n".encode())  # at once: the two do not wait for each other
if child:
    os.waitpid(child, 0)
"""


def test_request_ids_of_a_forked_process_differ() -> None:
    # A process without threads: forking with threads causes a warning.
    said = subprocess.check_output([sys.executable, "-c", FORKS], text=True).split()

    assert len(said) == 2
    assert said[0] != said[1]
