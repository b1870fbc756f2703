import math
from typing import Any

import orjson
import pytest

from epd.tools.observe.counting import Counter, Observed, Traffic
from epd.tools.observe.entry_sizes import EntrySizes
from epd.tools.observe.report import ObserveReport, Relayed, as_markdown, make_report
from epd.tools.observe.reuse import ReuseDistances
from tests.requests import data_url, image, input_audio, png, request, text, video

CHAT = "/v1/chat/completions"


def observed(body: Any, *, server: int = 0, path: str = CHAT) -> Observed:
    return Observed(path, "application/json", orjson.dumps(body), server)


def counted(*requests: Observed, sizes: EntrySizes | None = None) -> Traffic:
    stores = (2.0, math.inf) if sizes is None else (10_000.0, math.inf)
    traffic = Traffic(ReuseDistances(stores), sizes)
    for one_request in requests:
        traffic.count(one_request)
    return traffic


def report_of(
    traffic: Traffic, *, servers: int = 1, encode_ms: float | None = None
) -> ObserveReport:
    return make_report(traffic, Relayed(100.0, traffic.requests, 0, 0, 0, servers, encode_ms))


def test_equal_pictures_are_one_item_in_every_api() -> None:
    url = data_url(png(100, 50))
    traffic = counted(
        observed(request(image(url), text("a"))),
        observed(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            path="/v1/responses",
        ),
        observed(
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": url.partition(",")[2],
                                },
                            }
                        ],
                    }
                ],
            },
            path="/v1/messages",
        ),
    )

    assert traffic.unreadable == 0
    assert (traffic.distances.references, traffic.distances.distinct) == (3, 1)
    assert traffic.kinds["image"].pixels == 3 * 5000
    assert traffic.kinds["image"].repeats == 2


def test_each_modality_is_counted_apart() -> None:
    traffic = counted(observed(request(image(), video(), input_audio())), observed(request(text())))

    assert {name: kind.items for name, kind in traffic.kinds.items()} == {
        "image": 1,
        "video": 1,
        "audio": 1,
    }
    assert (traffic.requests, traffic.with_media) == (2, 1)


def test_repeats_are_told_apart_by_conversation_and_server() -> None:
    def turn(first: str, *, server: int) -> Observed:
        return observed(request(text(first), image(b"p")), server=server)

    traffic = counted(
        turn("a", server=0),
        turn("a", server=0),  # the same conversation, the same server
        turn("a", server=1),  # the same conversation, another server
        turn("b", server=1),  # another conversation
    )

    assert traffic.sampled_repeats == 3
    assert traffic.same_conversation == 2
    assert traffic.other_server == 1


def test_a_conversation_is_known_by_its_name_or_its_first_message() -> None:
    system = {"role": "system", "content": "s"}
    first = {"role": "user", "content": [text("look"), image(b"first")]}
    answer = {"role": "assistant", "content": "yes"}
    second = {"role": "user", "content": [image(b"p")]}
    turns = [[system, first, second], [system, first, answer, second]]
    traffic = counted(*(observed({"messages": messages}) for messages in turns))

    assert traffic.same_conversation == 2  # both pictures

    named = [request(image(b"p"), text(words), prompt_cache_key="k") for words in ("x", "y")]
    assert counted(*map(observed, named)).same_conversation == 1


def test_a_request_that_is_no_request_is_not_counted() -> None:
    traffic = counted(
        observed([]), observed(request(image("ftp://x"))), observed({}, path="/v1/unknown")
    )

    assert (traffic.requests, traffic.unreadable, traffic.distances.references) == (2, 2, 0)


@pytest.mark.parametrize("role", [[], {}, None, 7])
def test_odd_roles_are_counted(role: Any) -> None:
    messages = [{"role": role, "content": [image(b"p")]}]

    assert counted(observed({"messages": messages})).distances.references == 1


def test_counting_goes_on_after_a_request_that_cannot_be_counted() -> None:
    traffic = Traffic(ReuseDistances((math.inf,)))
    counter = Counter(traffic)
    counter.offer(observed(None)._replace(content_type=None))  # type: ignore[arg-type]
    counter.offer(observed(request(image(b"p"))))
    counter.close()

    assert (traffic.unreadable, traffic.distances.references) == (1, 1)


def test_media_of_an_unknown_size_count_as_the_mean_of_the_others() -> None:
    sizes = EntrySizes(token_bytes=10.0, token_pixels=1.0, fixed_tokens=0.0)
    traffic = counted(observed(request(image(png(30, 10)), image(b"?"))), sizes=sizes)
    again = counted(
        observed(request(image(png(30, 10)))),
        observed(request(image(b"?"))),
        observed(request(image(png(30, 10)))),
        sizes=sizes,
    )

    assert traffic.unsized == 1
    assert again.distances.hits(10_000.0) == 1  # 3,000 bytes each
    assert "1 media have no known entry size, and count as 3.0 kB" in as_markdown(
        report_of(traffic)
    )
    assert "is a guess" not in verdict(traffic)


def test_the_verdict_says_that_sizes_are_guessed() -> None:
    sizes = EntrySizes(token_bytes=10.0, token_pixels=0.0, fixed_tokens=0.0)
    body = observed(request(image(png(10, 10))))

    assert "the size of this store is a guess" in verdict(counted(body, body, sizes=sizes))


def answering(body: Any, **tokens: int) -> Observed:
    usage = {"usage": {"prompt_tokens_details": {"multimodal_tokens": tokens}}}
    return observed(body)._replace(answer=orjson.dumps(usage))


@pytest.mark.parametrize(("first", "size"), [(0, 250.0), (1, 750.0)])
def test_reported_tokens_are_divided_among_pictures_by_pixels(first: int, size: float) -> None:
    pictures = [image(png(10, 10)), image(png(10, 30))]
    traffic = Traffic(
        ReuseDistances((size - 1, size)), EntrySizes(10.0, token_pixels=0.0, fixed_tokens=0.0)
    )
    traffic.count(observed(request(pictures[first])))
    traffic.count(answering(request(pictures[first], pictures[1 - first]), image=100))

    assert [traffic.distances.hits(store) for store in traffic.distances.sizes] == [0, 1]
    assert (traffic.unsized, traffic.mean_bytes) == (1, 500)


def test_sounds_have_the_tokens_that_the_server_reports() -> None:
    sizes = EntrySizes(token_bytes=10.0, token_pixels=1.0, fixed_tokens=0.0)
    traffic = counted(answering(request(input_audio(), input_audio()), audio=60), sizes=sizes)

    assert (traffic.unsized, traffic.mean_bytes) == (0, 300)


def test_a_picture_at_a_url_is_known_by_it() -> None:
    body = request(image("https://host/a.png"))

    assert counted(observed(body), observed(body)).distances.distinct == 1


@pytest.mark.parametrize("pending_bytes", [10, 10_000])
def test_a_counter_that_is_behind_drops_requests(pending_bytes: int) -> None:
    counter = Counter(Traffic(ReuseDistances((math.inf,))), pending_bytes)
    body = observed(request(image(b"x" * 600)))
    with counter.lock:  # the thread cannot count
        for _ in range(20):
            counter.offer(body)
    counter.close()

    kept = pending_bytes // len(body.body)
    assert counter.dropped == 20 - kept
    assert counter.traffic.requests == kept


def verdict(traffic: Traffic, **relayed: Any) -> str:
    return " ".join(report_of(traffic, **relayed).verdict)


def test_the_verdict_is_no_without_media_and_without_repeats() -> None:
    assert "brings nothing" in verdict(counted(observed(request(text()))))

    unique = counted(*(observed(request(image(b"%d" % number))) for number in range(20)))
    assert "plain vLLM is the better choice" in verdict(unique)
    assert "Next:" not in verdict(unique)


def test_the_verdict_names_the_smallest_sufficient_store() -> None:
    pool = counted(*(observed(request(image(b"%d" % (number % 2)))) for number in range(20)))

    assert "A store of 2 entries would have answered 90% of all media" in verdict(pool)
    assert "Next: epd up" in verdict(pool)


def test_the_verdict_tells_repeats_that_an_engines_own_cache_may_have() -> None:
    turns = [observed(request(text("first"), image(b"p"))) for _ in range(10)]
    others = [observed(request(text(f"{n}"), image(b"p")), server=n % 2) for n in range(10)]

    assert "prefix cache" in verdict(counted(*turns))
    assert "100% of the repeats went to another server" in verdict(counted(*others), servers=2)


@pytest.mark.parametrize(("encode_ms", "word"), [(0.1, "would not pay"), (1000.0, "would pay")])
def test_encode_instances_pay_by_the_time_of_the_encodes_that_are_left(
    encode_ms: float, word: str
) -> None:
    # Twenty different pictures of a megapixel in 100 s.
    unique = counted(
        *(observed(request(image(png(1000, 1000) + b"%d" % number))) for number in range(20))
    )

    assert f"Encode instances {word}" in verdict(unique, encode_ms=encode_ms)
    assert "is not known" in verdict(unique)


def test_savings_are_in_bytes_pixels_and_seconds() -> None:
    body = request(image(png(1000, 1000)))
    traffic = counted(*[observed(body)] * 5)
    sent = len(data_url(png(1000, 1000)).partition(",")[2])
    report = report_of(traffic, encode_ms=50.0)

    assert [line.size for line in report.stores] == [2.0, None]
    assert report.stores[0].hit_rate == 0.8
    assert report.stores[0].unsent_bytes == 4 * sent
    assert report.stores[0].encode_s == pytest.approx(0.2)


def test_a_report_has_nothing_of_the_requests() -> None:
    traffic = counted(observed(request(image(b"secret"), text("a private word"), user="me")))
    report = report_of(traffic)

    for shown in (as_markdown(report), repr(traffic)):
        assert "private" not in shown
        assert "c2VjcmV0" not in shown
