"""Coordination policies of this project.

Most select the stages by the roles of the fleet. Of the others, one is for requests that are
cheaper on one instance (conditional disaggregation), one for a proxy beside a prefill instance,
such as a sidecar of its pod, and one for media items that are cheaper to encode where they are
consumed.
"""

from dataclasses import dataclass

from epd.policies.policy import Course, Facts, ItemFacts, ItemPlace
from epd.routing.instances import ANSWERING, Role


@dataclass(frozen=True, slots=True)
class EncodePrefillDecode:
    """Sends media to encode instances, then prefills, then decodes (E+P+D).

    A request that prefill cannot serve goes to decode alone, with its media: decode reads no
    encoder outputs.
    """

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        return Course(encode=facts.prefills, prefill=facts.prefills)


@dataclass(frozen=True, slots=True)
class EncodePD:
    """Sends media to encode instances; one instance prefills and decodes (E+PD)."""

    def course(self, facts: Facts) -> Course | None:
        return Course(prefill=False) if Role.PREFILL_DECODE in facts.roles else None


def _usual_course(facts: Facts) -> Course | None:
    return EncodePrefillDecode().course(facts) or EncodePD().course(facts)


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Skips the encode stage: prefill gets the media as received (P+D), or the PD instance does."""

    def course(self, facts: Facts) -> Course | None:
        if facts.roles.isdisjoint(ANSWERING):
            return None
        return Course(encode=False, prefill=facts.prefills and Role.DECODE in facts.roles)


@dataclass(frozen=True, slots=True)
class EncodeLocal:
    """Leaves media that are not in the store to prefill or PD, which writes them to the store.

    It is for fleets without encode instances, of engines with `ec_role` `ec_both`.
    """

    def course(self, facts: Facts) -> Course | None:
        usual = _usual_course(facts)
        return usual and usual._replace(consumer_encodes=True)


@dataclass(frozen=True, slots=True)
class PrefillLocalDecodeRemote:
    """Prefills on the instance beside the proxy, and decodes on another host.

    A request that prefill cannot serve goes to decode alone, with its media.

    Attributes:
        local_prefill_url: URL of the instance beside the proxy.

    Raises:
        ValueError: the URL is missing.
    """

    local_prefill_url: str | None = None

    def __post_init__(self) -> None:
        if not self.local_prefill_url:
            raise ValueError("needs local_prefill_url, or a prefill instance in the configuration")

    def course(self, facts: Facts) -> Course | None:
        if Role.DECODE not in facts.roles:
            return None
        encode = facts.prefills and Role.ENCODE in facts.roles
        return Course(encode, prefill=facts.prefills, prefill_url=self.local_prefill_url)


@dataclass(frozen=True, slots=True)
class PDOnly:
    """Serves a request on one instance if its prompt is short or has only text.

    It does not apply to requests with media, which need more work before decode.

    Attributes:
        skip_prefill_below_tokens: number of tokens below which a prompt is short; 0 for never.
        skip_prefill_for_text: whether it applies to all prompts of text, regardless of length.

    Raises:
        ValueError: no request could match the options.
    """

    skip_prefill_below_tokens: int = 0
    skip_prefill_for_text: bool = False

    def __post_init__(self) -> None:
        if not self.skip_prefill_below_tokens and not self.skip_prefill_for_text:
            raise ValueError(
                "does nothing without skip_prefill_below_tokens or skip_prefill_for_text"
            )

    def course(self, facts: Facts) -> Course | None:
        if facts.items or facts.roles.isdisjoint(ANSWERING):
            return None
        if self.skip_prefill_for_text or facts.prompt_tokens < self.skip_prefill_below_tokens:
            return Course(encode=False, prefill=False)
        return None


@dataclass(frozen=True, slots=True)
class Cost:
    """Leaves a media item to prefill or PD if that costs less than an encode instance.

    The stages are those of `encode_prefill_decode` or `encode_pd`. The cost is the sum of the
    delays of all requests: on an encode instance, the time until the item is encoded. At a
    consumer, the time of the encode there, once for the request and once for each other request at
    that instance, because an engine's step with an encode delays all of them.

    Attributes:
        encode_below_pixels: number of pixels below which a picture is left to prefill or PD; all
            other items are encoded by encode instances. 0 to compare the costs.
    """

    encode_below_pixels: int = 0

    def course(self, facts: Facts) -> Course | None:
        usual = _usual_course(facts)
        return usual and usual._replace(items=self)

    def place_item(self, facts: ItemFacts) -> ItemPlace:
        if not facts.stored:
            return ItemPlace(at_consumer=False, reason="unsaved")
        if self.encode_below_pixels:
            if not facts.pixels:
                return ItemPlace(at_consumer=False, reason="unknown_size")
            small = facts.pixels < self.encode_below_pixels
            return ItemPlace(small, "below_pixels" if small else "above_pixels")
        if facts.encode_s is None:
            return ItemPlace(at_consumer=False, reason="unmeasured")
        consumer_s = facts.consumer_queue_s + facts.own_s * (1 + facts.consumer_requests)
        return ItemPlace(consumer_s <= facts.encode_s, "cheaper", soonest=True)
