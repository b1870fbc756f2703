"""Answers through the stack equal those of an engine that receives the media directly."""

from epd.api.chat import CHAT
from epd.encoder_cache.identity import content_key
from epd.media.parts import Inline, source
from epd.tenants import Scope
from tests.e2e.asking import (
    PICTURES,
    PREPROCESSED,
    SOUNDS,
    ask,
    both_ways,
    check_equal,
    file,
    picture,
    sound,
    unseen,
)
from tests.e2e.served import Served, metric, stored
from tests.requests import text


@both_ways
def test_one_picture(stack: Served, stream: bool) -> None:
    check_equal(stack, picture("cat.jpg"), text(), stream=stream)


@both_ways
def test_four_pictures(stack: Served, stream: bool) -> None:
    check_equal(stack, *map(picture, PICTURES), text(), stream=stream)


@both_ways
def test_a_picture_twice(stack: Served, stream: bool) -> None:
    cat = picture("cat.jpg")
    check_equal(stack, cat, text("and"), picture("coffee.jpg"), cat, stream=stream)


@both_ways
def test_a_picture_from_a_file(stack: Served, stream: bool) -> None:
    check_equal(stack, file("astronaut.jpg"), text(), stream=stream)


@both_ways
def test_a_video(stack: Served, stream: bool) -> None:
    check_equal(stack, picture("ball.gif", "video_url"), text(), stream=stream)


@both_ways
def test_text_only(stack: Served, stream: bool) -> None:
    before = metric(stack.encode, "vllm:request_success_total")
    check_equal(stack, text("say something"), stream=stream)

    assert metric(stack.encode, "vllm:request_success_total") == before


@both_ways
def test_a_sound(stack: Served, stream: bool) -> None:
    check_equal(stack, sound("chirp.wav"), text(), stream=stream)


@both_ways
def test_two_sounds_one_by_url(stack: Served, stream: bool) -> None:
    by_url = picture("vowels.wav", "audio_url")
    check_equal(stack, sound("chord.wav"), by_url, text(), stream=stream)


def test_different_pictures_give_different_answers(stack: Served) -> None:
    """If different pictures had the same answer, the comparisons above would prove nothing."""
    answers = [ask(stack.client, stack.model, picture(name), text()) for name in PICTURES]
    there = ask(stack.client, stack.model, picture("cat.jpg"), picture("coffee.jpg"), text())
    back = ask(stack.client, stack.model, picture("coffee.jpg"), picture("cat.jpg"), text())

    assert len({tuple(answer) for answer in [*answers, there, back]}) == len(PICTURES) + 2


def test_different_sounds_give_different_answers(stack: Served) -> None:
    answers = {tuple(ask(stack.client, stack.model, sound(name), text())) for name in SOUNDS}

    assert len(answers) == len(SOUNDS)


def test_media_are_preprocessed_only_by_the_encode_engine(stack: Served) -> None:
    """By the engines' own metrics, the encode engine did all preprocessing.

    Prefill and decode received no media, only references to the encoder outputs.
    """
    engines = [stack.encode, *stack.consumers]
    known = set(stored(stack))
    before = [metric(engine, PREPROCESSED) for engine in engines]
    item = unseen(stack)
    ask(stack.client, stack.model, item, item, text("look!"))
    after = [metric(engine, PREPROCESSED) for engine in engines]

    moved = [new - old for new, old in zip(after, before, strict=True)]
    assert moved == [1] + [0] * len(stack.consumers)
    assert len(set(stored(stack)) - known) == 1


def test_an_engine_that_encodes_itself_would_have_been_seen(stack: Served) -> None:
    """The test above can fail: the same request to the decode engine alone increases its metric."""
    [decode] = [engine for engine in stack.consumers if "decode" in engine.name]
    before = metric(decode, PREPROCESSED)
    ask(stack.baseline, stack.model, unseen(stack), text("look!"))

    assert metric(decode, PREPROCESSED) == before + 1


def test_encoder_output_is_stored_under_its_content_key(stack: Served) -> None:
    item = picture("shapes.png") if "vl" in stack.model else sound("chord.wav")
    ask(stack.client, stack.model, item, text("first"))
    [found] = CHAT.items({"messages": [{"content": [item]}]})
    media = source(found)
    assert isinstance(media, Inline)

    info = stored(stack)[content_key(Scope(), found.modality, media)]
    dtype = "BF16" if stack.spec.bf16 else "F32"
    assert (info.modality, info.dtype, info.shape[1]) == (found.modality, dtype, 256)
    assert info.metadata


def test_prefill_fetches_from_the_store(stack: Served) -> None:
    consumer = stack.consumers[0]
    before = metric(consumer, "vllm:ec_store_hits_total")
    ask(stack.client, stack.model, unseen(stack), text("fetch it"))

    assert metric(consumer, "vllm:ec_store_hits_total") == before + 1
    assert metric(consumer, "vllm:ec_store_exceptions_total") == 0
