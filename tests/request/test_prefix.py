"""Prompts as chains, the known content of prefix caches, and the choice by both."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

import epd
from epd.api.endpoints import ENDPOINTS
from epd.api.items import Body
from epd.encoder_cache.identity import with_salt
from epd.errors import UpstreamUnreachable
from epd.request.item_tokens import media_tokens
from epd.request.prefix import MAX_LINKS as MAX_OF_PROMPT
from epd.request.prefix import PIECE_BYTES, request_prefix
from epd.request.request import Request
from epd.routing.balance import Choice
from epd.routing.engine_load import EngineLoad
from epd.routing.instances import Instance, Role
from epd.routing.load import Load
from epd.routing.prefix import (
    LINK_TTL_S,
    MAX_LINKS,
    NO_PREFIX,
    Prefix,
    PrefixCache,
)
from epd.routing.rendezvous import FEW_REQUESTS, LOAD_FACTOR, cheapest_engine
from epd.routing.reports import Report
from epd.routing.table import InstanceTable
from epd.tenants import Scope, Tenant
from epd.transfer.encoded import EncodedItem, OutputFacts
from tests.requests import image, request, text
from tests.support.clock import Clock

CHAT = "/v1/chat/completions"
CONFIG = epd.ProxyConfig(
    encode_servers_urls=(), decode_servers_urls=("http://d:1",), decode_balance="content"
)


def prefix_of(body: Body, path: str = CHAT, metadata: dict[str, Any] | None = None) -> Prefix:
    """Return the prompt of a request; the key of an item is its URL."""
    endpoint = ENDPOINTS[path]
    items = [
        replace(item, content_key=str(item.part["image_url"])) for item in endpoint.items(body)
    ]
    encoded = [EncodedItem(item, OutputFacts(metadata=metadata or {}), "hit") for item in items]
    return request_prefix(Request("r", {}, CONFIG, endpoint, body, items), encoded)


def common(one: Prefix, other: Prefix) -> int:
    """How many links two prompts have in common."""
    return len({*one.links} & {*other.links})


LONG = "x" * PIECE_BYTES
some_text = st.sampled_from(["", "a", "b", "user", "é", LONG, LONG + "a", LONG + "b", 3 * LONG])
some_part = st.one_of(
    some_text.map(text),
    st.sampled_from("ab").map(lambda name: image(f"http://x/{name}")),
    some_text,
)
some_message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system"]),
        "content": st.one_of(some_text, st.lists(some_part, max_size=3)),
    },
    optional={"name": st.sampled_from(["a", "b"]), "tool_calls": st.just([{"id": "1"}])},
)
some_chat = st.lists(some_message, max_size=4)


def units(messages: list[dict[str, Any]]) -> Iterator[object]:
    """Yield the contents of a prompt in order, with an entry for each link."""
    before: list[object] = []

    def pieces(said: str, *where: object) -> Iterator[object]:
        raw = said.encode()
        starts = range(0, max(1, len(raw)), PIECE_BYTES)
        for start in starts:
            yield (*before, *where, bool(start), raw[start : start + PIECE_BYTES])
            before.clear()

    for message in messages:
        before.append(
            ("message", sorted((k, str(v)) for k, v in message.items() if k != "content"))
        )
        if isinstance(message["content"], str):
            yield from pieces(message["content"], "content")
            continue
        for part in message["content"]:
            if isinstance(part, str):
                yield from pieces(part, "string")
            elif part["type"] == "text":
                before.append("text")
                yield from pieces(part["text"], "part")
            else:
                yield (*before, "picture", part["image_url"]["url"])
                before.clear()


@given(one=some_chat, other=some_chat, shared=some_chat)
def test_prompts_share_exactly_the_links_of_their_common_prefix(
    one: list[dict[str, Any]], other: list[dict[str, Any]], shared: list[dict[str, Any]]
) -> None:
    first, second = [*shared, *one], [*shared, *other]
    a, b = (prefix_of({"model": "m", "messages": chat}) for chat in (first, second))

    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(units(first), units(second)))  # noqa: B905
    equal = len(list(alike))
    assert len(a.links) == len(list(units(first)))
    assert a.links[:equal] == b.links[:equal]
    assert common(a, b) == equal
    assert list(a.ends) == sorted(a.ends)


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (CHAT, lambda said, url: request(text("Hello"), image(url), text(said))),
        (
            "/v1/responses",
            lambda said, url: {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": url}]},
                    {"type": "function_call_output", "call_id": "1", "output": said},
                ],
            },
        ),
        (
            "/v1/messages",
            lambda said, url: {
                "system": [{"type": "text", "text": "Be brief."}],
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [
                                    {"type": "image", "source": {"type": "url", "url": url}},
                                    {"type": "text", "text": said},
                                ],
                            }
                        ],
                    }
                ],
            },
        ),
    ],
)
def test_each_endpoint_has_links_for_its_text_and_its_pictures(path: str, make: Any) -> None:
    one, same, asks, sees = (
        prefix_of(make(said, f"http://x/{url}"), path)
        for said, url in (("q", "a"), ("q", "a"), ("other", "a"), ("q", "b"))
    )

    assert one == same
    assert common(one, asks) == len(one.links) - 1
    assert common(one, sees) == len(one.links) - 2
    assert one.tokens > 1024


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"], [1, 2, 3], [[1, 2, 3]]])
def test_a_completion_has_links_for_its_text_or_tokens(prompt: Any) -> None:
    one = prefix_of({"model": "m", "prompt": prompt}, "/v1/completions")

    assert one.tokens
    assert one == prefix_of({"model": "m", "prompt": prompt}, "/v1/completions")


@pytest.mark.parametrize(
    "more",
    [
        {"model": "other"},
        {"cache_salt": "s"},
        {"tools": [{"type": "function"}]},
        {"mm_processor_kwargs": {"fps": 1}},
        {"chat_template": "t"},
    ],
)
def test_prompts_that_differ_as_a_whole_have_no_link_in_common(more: dict[str, Any]) -> None:
    body = request(text("Hello"))

    assert common(prefix_of(body), prefix_of({**body, **more})) == 0


@given(chat=some_chat, salt=st.none() | st.just("s"))
def test_isolated_tenants_have_no_link_in_common(
    chat: list[dict[str, Any]], salt: str | None
) -> None:
    body = {"model": "m", "messages": chat} | ({} if salt is None else {"cache_salt": salt})
    one, other, shared = (
        prefix_of(with_salt(body, Scope(tenant, b"secret")))
        for tenant in (Tenant("a"), Tenant("b"), None)
    )

    assert common(one, other) == common(one, shared) == 0
    assert shared == prefix_of(body)


def test_an_endpoint_that_generates_nothing_has_no_prefixes() -> None:
    assert prefix_of({"text_1": "a", "text_2": "b"}, "/v1/score") is NO_PREFIX


def test_a_prompt_has_a_bounded_number_of_links() -> None:
    long = prefix_of(request(text(2 * MAX_OF_PROMPT * LONG), text("end")))

    assert len(long.links) == len(long.ends) == MAX_OF_PROMPT


def test_digests_are_the_same_in_every_process() -> None:
    assert prefix_of(request(text("Hello"))).links == [2154145634552598899]


@pytest.mark.parametrize(
    ("metadata", "tokens"),
    [
        ({"image_grid_thw": [1, 36, 54]}, 486),
        ({"image_grid_thw": [[1, 36, 54]]}, 486),
        ({"audio_num_tokens": [50]}, 50),
        ({"audio_num_tokens": []}, 0),
        ({"second_per_grid_ts": [0.5]}, 0),
        ({}, 0),
    ],
)
def test_items_are_weighed_by_their_reported_tokens(metadata: dict[str, Any], tokens: int) -> None:
    assert media_tokens(metadata) == tokens
    with_picture = prefix_of(request(image("http://x/a")), metadata=metadata)
    assert with_picture.tokens == pytest.approx(tokens or 1024, abs=10)


def chain(*names: str, tokens: int = 10) -> Prefix:
    """Return a prompt with a link for each name, which depends on the names before."""
    links = [xxh3_64_intdigest(repr(names[: end + 1]).encode()) for end in range(len(names))]
    return Prefix(links, [tokens * (end + 1) for end in range(len(names))])


some_prompt = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)


class CacheMachine(RuleBasedStateMachine):
    """A cache never has a link without those before it, nor more than its bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.cache = PrefixCache(self.clock)
        self.cache.limit = 120
        self.held: dict[int, float] = {}
        self.prompts: list[Prefix] = []

    @rule(names=some_prompt)
    def hold(self, names: list[str]) -> None:
        prompt = chain(*names)
        self.cache.hold(prompt)
        self.prompts.append(prompt)
        self.held |= dict.fromkeys(prompt.links, self.clock.now_s)
        assert self.cache.match(prompt) == len(prompt.links)

    @rule(seconds=st.sampled_from([1.0, LINK_TTL_S / 2, LINK_TTL_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def restart(self) -> None:
        self.cache.clear()
        self.held.clear()

    @rule(names=some_prompt)
    def count_prompt(self, names: list[str]) -> None:
        prompt, asked, matched = chain(*names), self.cache.prompt_tokens, self.cache.matched
        computed = self.cache.begin_prompt(prompt)
        self.prompts.append(prompt)
        self.held |= dict.fromkeys(prompt.links, self.clock.now_s)
        assert self.cache.prompt_tokens == asked + prompt.tokens
        assert self.cache.matched == matched + prompt.tokens - computed
        assert self.cache.pending == computed
        self.cache.pending -= computed

    @invariant()
    def is_bounded(self) -> None:
        for prompt in self.prompts:
            known = self.cache.match(prompt)
            for link in prompt.links[:known]:
                assert self.clock.now_s < self.held[link] + LINK_TTL_S
        assert self.cache.tokens == 10 * len(self.cache) <= self.cache.limit
        every = {link for one in self.prompts for link in one.links[: self.cache.match(one)]}
        assert len(every) == len(self.cache)


TestCacheMachine = CacheMachine.TestCase


def test_a_cache_has_a_bounded_number_of_links() -> None:
    cache = PrefixCache(Clock())
    for number in range(MAX_LINKS // 100 + 5):
        cache.hold(chain(*[f"{number} {link}" for link in range(100)], tokens=1))
        assert len(cache) <= MAX_LINKS

    assert len(cache) == MAX_LINKS
    assert cache.tokens == MAX_LINKS


def test_a_link_removed_by_an_event_is_not_matched() -> None:
    cache, prompt = PrefixCache(Clock()), chain("a", "b", "c")
    cache.hold(prompt)
    cache.drop(prompt.links[2])
    cache.drop(7)

    assert cache.match(prompt) == 2
    assert cache.tokens == 20


def test_the_reported_size_of_the_kv_cache_bounds_the_links() -> None:
    load = Load("http://x:1")
    load.report_due(0.0, 1.0)
    load.record_report(Report(0, 0, {}, kv_tokens=20), 0.0, 1.0)
    load.cache.hold(chain("a", "b", "c"))

    assert load.cache.match(chain("a", "b", "c")) == 2


class ChoiceMachine(RuleBasedStateMachine):
    """Whatever prompts come and end, no instance and no rank gets more than the load bound.

    An instance with few requests is below it in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        weights = {"http://a:1": 1.0, "http://b:1": 2.0, "http://c:1": 0.5}
        instances = [
            *(Instance(Role.PREFILL, url, weight=weight) for url, weight in weights.items()),
            Instance(Role.PREFILL, "http://ranks:1", dp_size=3),
        ]
        self.table = InstanceTable(instances, clock=Clock())
        self.choice = Choice(self.table, Role.PREFILL)
        self.running: list[Any] = []

    @rule(names=some_prompt, session=st.sampled_from(["", "s"]))
    def begin(self, names: list[str], session: str) -> None:
        prompt = chain(*names)._replace(session=session)
        seats = [seat for one in self.table.all(Role.PREFILL) for seat in one.load.engines]
        each = LOAD_FACTOR * (sum(one.value for one in seats) + 1) / sum(s.share for s in seats)
        chosen = self.choice.best_instance(balance="content", prefix=prompt)
        using = self.table.track_request(chosen, prefix=prompt).begin_request()
        load = self.table.load(chosen)
        if not load.ranks:
            assert load.value < max(each * load.share, FEW_REQUESTS) + 1
        else:
            most = LOAD_FACTOR * load.value / len(load.engines)
            assert load.ranks[using.rank or 0].value < max(most, FEW_REQUESTS) + 1
        self.running.append(using)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), answers=st.booleans())
    def end(self, data: st.DataObject, answers: bool) -> None:
        using = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if answers:
            using.record_answer()
        using.end_request()

    @invariant()
    def no_prompt_waits_where_nothing_runs(self) -> None:
        for one in self.table.all(Role.PREFILL):
            for seat in one.load.engines:
                assert seat.cache.pending >= 0
                assert seat.under_way or not seat.cache.pending


TestChoiceMachine = ChoiceMachine.TestCase


def engines(count: int = 4) -> list[EngineLoad]:
    return [Load(f"http://x{number}:1", clock=Clock()) for number in range(count)]


@given(names=some_prompt, order=st.permutations(range(4)))
def test_proxies_that_know_nothing_agree(names: list[str], order: list[int]) -> None:
    own, others = engines(), engines()
    first = cheapest_engine(own, chain(*names))
    second = cheapest_engine([others[one] for one in order], chain(*names))

    assert own.index(first) == others.index(second)


def test_an_engine_with_few_requests_is_not_overloaded() -> None:
    table = InstanceTable([Instance(Role.PREFILL, f"http://x{one}:1") for one in range(2)])
    choice, prompt = Choice(table, Role.PREFILL), chain("a", "b", "c")
    chosen = []
    for _ in range(FEW_REQUESTS + 1):
        chosen.append(choice.best_instance(balance="content", prefix=prompt))
        table.track_request(chosen[-1], prefix=prompt).begin_request()

    assert len(set(chosen[:FEW_REQUESTS])) == 1
    assert chosen[FEW_REQUESTS] != chosen[0]


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    loads = engines()
    loads[1].cache.hold(chain("a", "b"))
    loads[2].cache.hold(chain("a", "b", "c", "d"))

    assert cheapest_engine(loads, chain("a", "b", "c", "d", "e")) is loads[2]
    assert cheapest_engine(loads, chain("a", "b")) in loads[1:3]


def test_new_prompts_with_a_common_beginning_are_spread() -> None:
    loads = engines()
    loads[0].cache.hold(chain("system"))
    chosen = {cheapest_engine(loads, chain("system", f"{one}", "b", "c")).seed for one in range(40)}

    assert len(chosen) == len(loads)


def test_a_prompt_leaves_a_long_queue() -> None:
    loads, prompt = engines(), chain("a", tokens=100)
    loads[0].cache.hold(prompt)
    assert cheapest_engine(loads, prompt) is loads[0]
    loads[0].cache.pending = 100_000

    assert cheapest_engine(loads, prompt) is not loads[0]


def test_requests_of_others_count_as_a_queue() -> None:
    loads, prompt = engines(2), chain("a", tokens=1)
    for load in loads:
        load.cache.hold(prompt)
        load.begin_request()
        load.cache.pending = 1000
        load.begin_request()
    loads[0].report_requested()
    loads[0].set_reported(3)

    assert cheapest_engine(loads, prompt) is loads[1]


ONES = [Instance(Role.PREFILL, f"http://p{number}:1") for number in range(3)]


def test_the_instance_of_a_conversation_precedes_the_content() -> None:
    table = InstanceTable(ONES, clock=Clock())
    table.load(ONES[0]).cache.hold(chain("a"))
    choice = Choice(table, Role.PREFILL)

    def best(**more: Any) -> Instance:
        return choice.best_instance(balance="content", prefix=chain("a"), **more)

    assert best() == ONES[0]
    assert best(prefer=ONES[1].url) == ONES[1]
    assert best(tried=[ONES[0]]) != ONES[0]


def test_a_request_without_a_prefix_goes_to_the_least_load() -> None:
    table = InstanceTable(ONES, clock=Clock())
    choice = Choice(table, Role.PREFILL)

    assert {choice.best_instance(balance="content") for _ in range(3)} == set(ONES)


def test_a_removed_or_dead_instance_has_lost_its_cache() -> None:
    table = InstanceTable(ONES, clock=Clock())
    first, second, _ = ONES
    for one in ONES:
        table.load(one).cache.hold(chain("a"))
    with table.track_request(first):
        table.remove(first)
        table.add(first)
    for _ in range(3):
        table.record_probe(second, well=False)

    assert [table.load(one).cache.match(chain("a")) for one in ONES] == [0, 0, 1]


def test_ranks_are_chosen_by_their_own_caches() -> None:
    instance = Instance(Role.PREFILL, "http://ranks:1", dp_size=4)
    table = InstanceTable([instance], clock=Clock())
    ranks = []
    for name in "abcdefgh" * 2:
        with table.track_request(instance, prefix=chain(name, name)) as using:
            ranks.append(using.rank)

    assert ranks[:8] == ranks[8:]
    assert len({*ranks}) > 1
    assert table.load(instance).prompts == (16 * 20, 8 * 20)


def test_a_failed_request_waits_no_longer() -> None:
    table = InstanceTable(ONES, clock=Clock())
    cache = table.load(ONES[0]).cache
    using = table.track_request(ONES[0], prefix=chain("a")).begin_request()
    assert (using.matched, cache.pending) == (0, 10)
    using.end_request(UpstreamUnreachable("x"))

    assert cache.pending == 0
