"""Where the missing items of a request are encoded."""

from dataclasses import dataclass, field

from epd.policies.policy import ItemFacts, ItemPlace
from epd.routing.forecast import ASSUMED_S
from tests.support.encode_fleet import EncodeFleet


@dataclass
class LeaveAll:
    """Rule that leaves all items to the consumer, and keeps what it was told of them."""

    facts: list[ItemFacts] = field(default_factory=list)

    def place_item(self, facts: ItemFacts) -> ItemPlace:
        self.facts.append(facts)
        return ItemPlace(at_consumer=True, reason="cheaper")


def test_items_left_to_a_consumer_count_for_the_next_item_of_the_request() -> None:
    rule = LeaveAll()
    first, second = EncodeFleet(rule).place_items(300, 100)

    assert first.at_consumer
    assert second.at_consumer
    assert [facts.consumer_queue_s for facts in rule.facts] == [0, first.tokens * ASSUMED_S]
