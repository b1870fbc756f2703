"""Request context through the stages of a request."""

from epd.config import ProxyConfig
from epd.request.context import RequestContext


def test_a_stage_that_ends_after_its_request_is_not_in_the_request_s_record() -> None:
    context = RequestContext("id", {}, ProxyConfig.model_construct())
    with context.time_stage("decode", "http://d:1"):
        pass
    context.record.ended = True
    with context.time_stage("release", "http://d:1"):
        pass

    assert [one.stage for one in context.record.stages] == ["decode"]
