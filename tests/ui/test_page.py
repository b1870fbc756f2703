"""The page `/ui` in a real browser, served by a real proxy process."""

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
import pytest
from axe_playwright_python.async_playwright import Axe
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.async_api import Locator, Page, expect

from ec_store import EntryKey, open_store
from ec_store.testing.stores import sized
from epd.ui.formats import bytes_text, rate_text, seconds_text
from epd.ui.state import Moment, Totals
from epd.ui.state import state as render
from tests.support import backed
from tests.support.backed import NAMESPACE, registered
from tests.support.fake_instance import FakeInstance, decodes
from tests.support.programs import run, serving
from tests.ui.browsing import PATIENT_MS, QUICK, Stack, Tabs, stack_of
from tests.ui.states import large

pytestmark = pytest.mark.asyncio(loop_scope="session")
expect.set_options(timeout=PATIENT_MS)

ADMIN = "admin-key-0123456789"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;${hacked}'

NONE = "\N{EN DASH}"
"""Text of an unknown figure."""

ROLES = ("Encode", "Prefill", "Decode")


async def background(page: Page) -> str:
    return str(await page.evaluate("getComputedStyle(document.body).backgroundColor"))


async def test_the_page_loads_without_errors_or_requests_elsewhere(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url) as looked:
        await expect(looked.page.locator("#link")).to_have_text("live")
        await expect(looked.page.locator("#saved")).to_contain_text("Saved")
        columns = looked.page.locator("#instances section")
        await expect(columns).to_have_text([re.compile(f"{role} 1 of 1 healthy") for role in ROLES])
        await expect(looked.page.locator("#about")).to_contain_text("1e1p1d")

    assert {urlsplit(url).netloc for url in looked.asked} == {urlsplit(stack.url).netloc}


async def test_a_request_shows_up_and_opens_by_keyboard(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url) as looked:
        await expect(looked.page.locator("#link")).to_have_text("live")
        assert await stack.chat("shown-soon") == 200
        button = looked.page.get_by_role("button", name="shown-soon")
        await expect(button).to_have_attribute("aria-expanded", "false")
        row = looked.page.get_by_role("row").filter(has=button)
        await expect(row.get_by_role("img")).to_have_attribute(
            "aria-label", re.compile("encode .*s; prefill .*s; decode .*s")
        )
        await button.focus()
        await looked.page.keyboard.press("Enter")
        detail = looked.page.locator(".detail")
        await expect(detail).to_contain_text(stack.prefill.url.removeprefix("http://"))
        await expect(button).to_be_focused()
        assert await stack.chat("shown-later") == 200
        await expect(looked.page.get_by_role("button", name="shown-later")).to_be_visible()

        await expect(button).to_be_focused()
        await expect(detail).to_be_visible()


async def test_a_stopped_instance_is_shown_as_down_until_it_recovers(tab: Tabs) -> None:
    async with stack_of() as stack:
        gone = stack.encode
        async with tab(stack.url) as looked:
            card = looked.page.locator("#instances li").filter(has_text=urlsplit(gone.url).netloc)
            await expect(card).to_have_attribute("data-state", "healthy")
            gone.healthy = False
            await expect(card.locator(".state")).to_have_text("down")
            await expect(card.locator(".cause")).to_have_text("failed health checks")
            await expect(looked.page.get_by_role("log")).to_contain_text("Encode is down")
            await expect(looked.page).to_have_title(re.compile("1 instance not healthy"))
            gone.healthy = True
            # The instance is on trial, and a request passes the trial.
            assert await stack.chat() == 200
            await expect(card).to_have_attribute("data-state", "healthy")
            await expect(card.locator(".cause")).to_be_empty()
            await expect(looked.page.get_by_role("log")).to_contain_text("Encode is healthy")
            await expect(looked.page).to_have_title("EPD proxy")


async def test_the_page_shows_why_an_instance_gets_no_requests(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url, state=large(4)) as looked:
        instances, log = looked.page.locator("#instances"), looked.page.get_by_role("log")
        hung = instances.locator("li[data-state=ejected]").first
        await expect(hung.locator(".cause")).to_have_text("timeouts without progress")
        refused = instances.locator("li[data-state=down]").first
        await expect(refused.locator(".cause")).to_have_text("connection refused")
        await expect(log).to_contain_text("is down: connection refused")
        trial = instances.locator("li[data-state=trial]").first
        await expect(trial.locator(".state")).to_have_text("on trial")


async def test_servers_that_do_all_three_are_shown_and_counted_once(
    tab: Tabs, tmp_path: Path
) -> None:
    servers = [FakeInstance(decodes, metrics=backed.Page()) for _ in range(2)]
    async with AsyncExitStack() as opened:
        for server in servers:
            await opened.enter_async_context(server.running())
        urls = ",".join(server.url for server in servers)
        store = f"file://{tmp_path}/store?max_bytes=1GiB"
        process = serving("--servers-urls", urls, "--ec-store", store, *QUICK)
        url, _ = await asyncio.to_thread(process.__enter__)
        opened.push_async_callback(asyncio.to_thread, process.__exit__, None, None, None)
        looked = await opened.enter_async_context(tab(url))
        await expect(looked.page.locator("#about")).to_contain_text("2epd")
        [column] = await looked.page.locator("#instances section").all()
        await expect(column).to_contain_text("Prefill and decode 2 of 2 healthy")
        await expect(column.locator("li")).to_contain_text(["EPD1", "EPD2"])
        shown = await asyncio.to_thread(run, "top", "--once", "--url", url)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as reply:
            up = re.findall(r"^epd_instance_up.*", await reply.text(), re.MULTILINE)
    assert "  2epd  " in shown.stdout
    assert re.findall(r"^\S*PD\d", shown.stdout, re.MULTILINE) == ["EPD1", "EPD2"]
    assert len(up) == 2


@pytest.mark.parametrize("roles", [(), ("encode",), ("decode",), ("prefill_decode",)])
@pytest.mark.parametrize("width", [360, 1280])
async def test_a_fleet_that_lacks_stages_is_shown(
    tab: Tabs, stack: Stack, roles: tuple[str, ...], width: int
) -> None:
    """The fleet starts without instances, or loses the last one."""
    state = cast("dict[str, Any]", large(1))
    [one, *_] = state["instances"]
    left = {"kind": "instance", "at_s": state["now"], "what": "http://gone:1", "message": "removed"}
    state["instances"] = [{**one, "role": role} for role in roles]
    state["notices"] = [{**left, "more": "prefill"}]
    async with tab(stack.url, state=state, width=width) as looked:
        await expect(looked.page.get_by_role("log")).to_contain_text("Prefill is removed")
        await expect(looked.page.locator("#instances li")).to_have_count(len(roles))


async def test_the_page_shows_what_was_saved(tab: Tabs, stack: Stack) -> None:
    async with tab(stack.url, state=large(1)) as looked:
        saved, details = looked.page.locator("#saved"), looked.page.locator("#details")
        await expect(saved).to_have_text(
            "Saved 830 encodes, 312 MB of media not sent, about 148 s of encoding."
        )
        await expect(saved.locator("b")).to_have_text(["830 encodes", "312 MB", "148 s"])
        await expect(details).to_contain_text("Hit rate 83 %; 93 % of media")
        await expect(details.locator("b")).to_have_text(
            [
                "83 %",
                "93 %",
                "70",
                "60 turns",
                "75 %",
                "12 conversations",
            ]
        )


async def test_rejected_requests_are_shown_apart_from_failed_ones(tab: Tabs, stack: Stack) -> None:
    state = cast("dict[str, Any]", large(1))
    state["minute"] |= {"failed": 0, "rejected": 3}
    for one in (*state["instances"], *state["stages"]):
        one["failed"], one["rejected"] = 0, 57
    state["requests"] = [{**state["requests"][0], "outcome": "rejected"}]
    async with tab(stack.url, state=state) as looked:
        tiles = looked.page.locator("#tiles li")
        failed = tiles.filter(has_text="Failed, last minute")
        await expect(failed.locator("b")).to_have_text("0")
        await expect(failed.locator("small")).to_have_text(
            "3 rejected; since the start 4 failed, 7 rejected"
        )
        for shown, words in (
            ("#instances li", "rejected 57"),
            ("#latency tbody tr", "57 rejected"),
        ):
            await expect(looked.page.locator(shown).first).to_contain_text(words)
            await expect(looked.page.locator(shown).first).not_to_contain_text("failed")
        row = looked.page.locator("#requests tbody tr")
        await expect(row).to_have_attribute("data-outcome", "rejected")


def tile(page: Page, title: str) -> Locator:
    return page.locator("#tiles li").filter(has_text=title)


async def test_the_time_to_the_first_token_is_shown_of_streams(tab: Tabs) -> None:
    async with stack_of() as stack, tab(stack.url) as looked:
        first, whole = (
            tile(looked.page, f"{title}, p50") for title in ("Time to first token", "Whole request")
        )
        assert await stack.chat() == 200
        await expect(whole.locator("small")).to_contain_text(", 1 answer")
        await expect(first.locator("b")).to_have_text(NONE)
        await expect(first.locator("small")).to_have_text("no stream yet")
        assert await stack.chat(stream=True) == 200
        await expect(first.locator("small")).to_contain_text(", 1 stream")
        found = (await stack.state())["first_token"]
        await expect(first.locator("b")).to_have_text(seconds_text(found["p50_s"]))
        await expect(first.locator("small")).to_contain_text(f"p90 {seconds_text(found['p90_s'])},")
        await expect(looked.page.locator(".axis")).to_contain_text("of streams only")


async def test_the_use_of_a_store_is_shown_as_a_bar(tab: Tabs, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store?max_bytes=1MiB"
    with open_store(url) as store:
        assert registered(store)
        assert store.put(EntryKey(NAMESPACE, "a"), sized(500_000))
        async with stack_of("--ec-store", url) as stack, tab(stack.url) as looked:
            row = looked.page.locator("#stores li")
            await expect(row).to_contain_text("1 entry · evictions unknown")
            [found] = (await stack.state())["stores"]
            used, quota = found["bytes"], found["max_bytes"]
            assert used
            assert quota == 2**20
            await expect(row.locator("b")).to_have_text(f"{bytes_text(used)} of 1.0 MB")
            meter = row.get_by_role("meter")
            await expect(meter).to_have_attribute("aria-valuenow", str(round(100 * used / quota)))
            share = await meter.evaluate("e => e.firstChild.offsetWidth / e.offsetWidth")
            await expect(looked.page.locator("#store")).to_contain_text("shared disk")

            assert share == pytest.approx(used / quota, abs=0.02)


async def test_each_memory_of_a_host_has_a_bar_and_unknown_is_not_0(
    tab: Tabs, stack: Stack
) -> None:
    state = cast("dict[str, Any]", large(1))
    state["stores"][0] |= {"refused": 3}
    async with tab(stack.url, state=state) as looked:
        full, silent = (looked.page.locator("#stores li").nth(number) for number in (0, 1))
        await expect(full).to_contain_text("10.0.0.1:7000")
        await expect(full).to_contain_text("1,234 entries · 56 evictions · 3 writes refused")
        await expect(silent.locator("b")).to_have_text("unknown")
        await expect(silent).to_contain_text("no figures from the store · requests bypass it")
        await expect(silent.get_by_role("meter")).to_have_count(0)

        assert not re.search(r"\b0\b", await silent.locator("span").inner_text())


async def test_a_page_without_a_store_says_so(tab: Tabs, stack: Stack) -> None:
    async with tab(stack.url) as looked:
        await expect(looked.page.locator("#store")).to_have_text("none, see --ec-store")
        await expect(looked.page.locator("#stores li")).to_have_count(0)


async def test_stages_have_bars_on_a_scale_and_no_rows_without_data(
    tab: Tabs, stack: Stack
) -> None:
    async with tab(stack.url, state=large(1)) as looked:
        rows = looked.page.locator("#latency tbody tr")
        await expect(rows.locator("th")).to_have_text(
            [re.compile(name) for name in ("store", "encode", "prefill", "decode")]
        )
        await expect(looked.page.locator("#latency-end")).to_have_text("100 ms")
        widths = await rows.locator("rect.p50").evaluate_all(
            "all => all.map((e) => Number(e.getAttribute('width')))"
        )

        assert widths == [40, 1000, 500, 300]  # of 1000: 4, 100, 50 and 30 ms


async def test_instances_show_their_reports_and_a_common_version_once(
    tab: Tabs, stack: Stack
) -> None:
    state = cast("dict[str, Any]", large(1))
    [_, _, decode] = state["instances"]
    decode |= {"waiting": 7, "kv_usage": 0.42, "prefix_hits": 0.715}
    async with tab(stack.url, state=state) as looked:
        card = looked.page.locator("#instances li").filter(has_text="D1")
        await expect(card.locator(".busy")).to_have_text("0 in flight · 7 queued")
        await expect(card.locator(".facts")).to_contain_text("KV use 42 %")
        await expect(card.locator(".facts")).to_contain_text("prefix hits 72 %")
        await expect(looked.page.locator("#fleet")).to_have_text("vLLM 0.33.0")
        await expect(card.locator(".version")).to_be_empty()
    state["instances"][0] |= {"version": None}  # an unknown version is not another one
    async with tab(stack.url, state=state) as looked:
        await expect(looked.page.locator("#fleet")).to_have_text("vLLM 0.33.0")
    decode |= {"version": "0.34.0", "waiting": None, "kv_usage": None, "prefix_hits": None}
    decode |= {"prompt_tokens": 100, "prefix_tokens": 80}
    async with tab(stack.url, state=state) as looked:
        card = looked.page.locator("#instances li").filter(has_text="D1")
        await expect(card.locator(".version")).to_have_text("vLLM 0.34.0")
        await expect(looked.page.locator("#fleet")).to_be_empty()
        await expect(card.locator(".busy")).to_have_text("0 in flight")
        await expect(card.locator(".facts")).to_contain_text("prefix hits expected 80 %")
        await expect(card.locator(".facts")).not_to_contain_text("KV use")


async def test_saved_encodes_of_unknown_duration_show_no_time(tab: Tabs, stack: Stack) -> None:
    known = large(1)["totals"]
    totals = {**known, "saved": {"encodes": 2, "bytes": 0, "encode_seconds": 0.0}}
    state = render([], cast("Totals", totals), None, Moment(5000.0, 1e9))
    async with tab(stack.url, state=state) as looked:
        await expect(looked.page.locator("#saved")).to_have_text("Saved 2 encodes.")


OVERLAPS = """() => {
  const shown = [...document.querySelectorAll("header, main")].flatMap((part) => [...part.querySelectorAll("*")]);
  const boxes = shown.flatMap((element) => {
    const drawn = element.matches("svg, .load, .swatch, button, img");
    const texts = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    if (element.closest(".hidden, [hidden]") || (!drawn && !texts.length)) return [];
    const range = document.createRange();
    const rects = drawn ? [element.getBoundingClientRect()] : texts.flatMap((node) => (range.selectNodeContents(node), [...range.getClientRects()]));
    const clip = element.closest(".scroll")?.getBoundingClientRect();
    const own = getComputedStyle(element).overflowX === "hidden" ? element.getBoundingClientRect() : null;
    return rects.map((rect) => ({
      element, name: `${element.tagName} ${element.className.baseVal ?? element.className} ${element.textContent.slice(0, 30)}`,
      left: rect.left, right: Math.min(rect.right, own?.right ?? Infinity), top: rect.top, bottom: rect.bottom,
    })).filter((box) => box.right - box.left > 1 && box.bottom - box.top > 1 && (!clip || (box.top >= clip.top && box.bottom <= clip.bottom)));
  });
  const found = [];
  boxes.forEach((a, index) => boxes.slice(index + 1).forEach((b) => {
    if (a.element.contains(b.element) || b.element.contains(a.element)) return;
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 3) found.push(`${a.name} / ${b.name}`);
  }));
  const outside = boxes.filter((box) => box.left < 0 || box.right > document.documentElement.clientWidth).map((box) => box.name);
  return [...found, ...outside];
}"""  # noqa: E501 - one script
"""Names of the boxes that overlap, or are outside the window."""


@pytest.mark.parametrize("width", [360, 390, 800, 1024, 1400])
async def test_no_boxes_overlap_at_any_width(stack: Stack, tab: Tabs, width: int) -> None:
    state = cast("dict[str, Any]", large(2))
    for port, one in enumerate(state["instances"], 23111):
        one |= {"requests": 498, "waiting": 1231, "url": f"http://127.0.0.1:{port}", "p50_s": 12.5}
    for one in state["requests"]:
        one |= {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "seconds": 148.2}
    state["totals"] |= {"in_flight": 12345, "queued": 6789}
    async with tab(stack.url, width=width, state=state) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(6)

        assert await looked.page.evaluate(OVERLAPS) == []


async def test_the_overlap_check_finds_an_overlap(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url, state=large(1)) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(3)
        code = looked.page.locator("#instances code").first
        await code.evaluate("e => e.style.transform = 'translateY(20px)'")

        assert await looked.page.evaluate(OVERLAPS) != []


def tied(value: float) -> bool:
    """Return whether rounding depends on what a tie rounds to: the two languages differ."""
    return any((value * 10**digits) % 1 == 0.5 for digits in range(3))


async def test_figures_are_written_as_epd_top_writes_them(stack: Stack, tab: Tabs) -> None:
    values: list[float] = []

    @settings(max_examples=400, database=None)
    @given(st.floats(0, 1e15, allow_subnormal=False) | st.floats(0, 1e4) | st.integers(0, 10**15))
    def collect(value: float) -> None:
        forms = [value, value * 1000, *(value / 1000**unit for unit in range(1, 5))]
        if not any(map(tied, forms)):
            values.append(value)

    collect()
    values += [0, 0.9995, 0.99949, 0.9996, 99.96, 999, 1000, 999.6e3, 5e12]
    async with tab(stack.url) as looked:
        written = await looked.page.evaluate(
            """async (values) => {
              const {seconds, bytes, rate} = await import("/ui/format.js");
              return values.map((value) => [seconds(value), bytes(value), rate(value)]);
            }""",
            values,
        )

    assert len(values) > 100
    for value, texts in zip(values, written, strict=True):
        assert texts == [seconds_text(value), bytes_text(value), rate_text(value)], value


async def test_the_end_of_a_scale_has_no_needless_zeros(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url) as looked:
        shown = await looked.page.evaluate(
            'async (values) => values.map((await import("/ui/format.js")).scaleEnd)',
            [0.001, 0.0012, 0.08, 0.1, 2, 2.5],
        )

    assert shown == ["1 ms", "1.2 ms", "80 ms", "100 ms", "2 s", "2.5 s"]


@pytest.mark.parametrize("longest_s", [0.0, 0.0004, 0.001, 0.0999, 0.1, 0.5, 0.51, 7.3, 3600.0])
async def test_a_scale_ends_at_or_above_the_longest_bar(
    stack: Stack, tab: Tabs, longest_s: float
) -> None:
    async with tab(stack.url) as looked:
        end_s = await looked.page.evaluate(
            'async (value) => (await import("/ui/format.js")).scale(value)', longest_s
        )

    assert longest_s <= end_s * 1.0001
    assert end_s <= max(0.001, 1.5 * longest_s)


async def test_the_bandwidth_of_kv_transfers_is_shown_at_decode(tab: Tabs, stack: Stack) -> None:
    async with tab(stack.url, state=large(1)) as looked:
        cards = looked.page.locator("#instances li")
        await expect(cards.filter(has_text="KV transfers 480 MB/s")).to_have_count(1)


async def test_the_page_shows_a_lost_proxy_and_reconnects(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url) as looked:
        link = looked.page.locator("#link")
        await expect(link).to_have_text("live")
        await looked.page.route("**/ui/state", lambda route: route.abort())
        await expect(link).to_contain_text("no answer since")
        await looked.page.unroute("**/ui/state")
        await expect(link).to_have_text("live")
        looked.wrong.clear()  # the browser reports requests without an answer


async def test_the_page_asks_for_the_key_and_keeps_it_out_of_urls(tab: Tabs) -> None:
    async with stack_of(env={"EPD_ADMIN_API_KEY": ADMIN}) as stack, tab(stack.url) as looked:
        dialog = looked.page.get_by_role("dialog", name="Admin key")
        entry = dialog.get_by_label("Key")
        await expect(entry).to_be_focused()
        await entry.fill("wrong-key-0123456789")
        await entry.press("Enter")
        await expect(dialog).to_contain_text("That key does not open")
        await entry.fill(ADMIN)
        await entry.press("Enter")
        await expect(looked.page.locator("#link")).to_have_text("live")
        await expect(dialog).to_be_hidden()
        await looked.page.reload()
        await expect(looked.page.locator("#link")).to_have_text("live")

        assert not any("key-" in url for url in looked.asked)
        assert ADMIN not in await looked.page.content()
        assert ADMIN not in await looked.page.evaluate("JSON.stringify(localStorage)")
        assert await looked.page.context.cookies() == []
        looked.wrong.clear()  # the browser reports statuses of 401


async def test_a_proxy_without_a_key_shows_why_it_refuses(stack: Stack, tab: Tabs) -> None:
    forwarded = {"X-Forwarded-For": "192.0.2.1"}  # added by a reverse proxy on this machine
    async with tab(stack.url, extra_http_headers=forwarded) as looked:
        await expect(looked.page.get_by_role("alert")).to_contain_text("EPD_ADMIN_API_KEY")
        await expect(looked.page.get_by_role("dialog")).to_be_hidden()
        looked.wrong.clear()  # the browser reports statuses of 403


async def test_the_page_is_dark_or_light_by_the_system(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url, color_scheme="dark") as looked:
        dark = await background(looked.page)
        await looked.page.emulate_media(color_scheme="light")

        assert dark != await background(looked.page)


@pytest.mark.parametrize("width", [360, 390, 800, 1024, 1400])
async def test_page_is_no_wider_than_the_window(stack: Stack, tab: Tabs, width: int) -> None:
    async with tab(stack.url, width=width, state=large(20)) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(60)
        await looked.page.locator(".open").first.click()
        await expect(looked.page.locator(".detail")).to_be_visible()

        wide = await looked.page.evaluate("document.documentElement.scrollWidth")

        assert wide == width


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [360, 1280])
async def test_axe_finds_nothing(stack: Stack, tab: Tabs, scheme: str, width: int) -> None:
    async with tab(stack.url, width=width, color_scheme=scheme, state=large(4)) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(12)
        await looked.page.locator(".open").first.click()
        await looked.page.locator("#pause").click()
        found = await Axe().run(looked.page)

    wrong = [
        (one["id"], node["target"], node["any"][:1] or node["all"][:1] or node["none"][:1])
        for one in found.response["violations"]
        for node in one["nodes"]
    ]
    assert wrong == []


async def test_page_controls_are_reachable_by_keyboard(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url, state=large(1)) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(3)
        reached = []
        for _ in range(6):
            await looked.page.keyboard.press("Tab")
            reached.append(
                await looked.page.evaluate(
                    "[document.activeElement.id || document.activeElement.className,"
                    " getComputedStyle(document.activeElement).outlineStyle]"
                )
            )

    names = [name for name, _ in reached]
    assert names == ["skip", "pause", "instances", "scroll short", "scroll", "open"]
    assert {style for _, style in reached} == {"solid"}


async def test_pause_stops_it(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url) as looked:
        await expect(looked.page.locator("#link")).to_have_text("live")
        pause = looked.page.get_by_role("button", name="Pause")
        await pause.click()
        await expect(pause).to_have_attribute("aria-pressed", "true")
        await expect(looked.page.locator("#link")).to_contain_text("as of")
        before = len(looked.asked)
        await asyncio.sleep(1.5)

        assert len(looked.asked) - before <= 1  # a request that was already in progress
        await pause.click()
        await expect(looked.page.locator("#link")).to_have_text("live")


async def test_page_has_no_animations_with_reduced_motion(stack: Stack, tab: Tabs) -> None:
    async with tab(stack.url, state=large(2), reduced_motion="reduce") as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(6)

        assert await looked.page.evaluate("document.getAnimations().length") == 0


@pytest.mark.parametrize(
    ("store", "shown"), [("shm", "memory of the host"), ("file", "shared disk"), ("x", "x")]
)
async def test_page_names_the_kind_of_the_store(
    stack: Stack, tab: Tabs, store: str, shown: str
) -> None:
    state = cast("dict[str, Any]", large(1)) | {"store": store}
    async with tab(stack.url, state=state) as looked:
        text = looked.page.locator("#store")

        await expect(text).to_have_text(re.compile(rf"{shown} · .* lookups/s · 830 hits in all"))


async def test_values_from_outside_are_shown_as_text(stack: Stack, tab: Tabs) -> None:
    state = cast("dict[str, Any]", large(2, HOSTILE))
    state["version"] = state["store"] = HOSTILE
    for one in state["instances"]:
        one["state"] = f"down{HOSTILE}"
    async with tab(stack.url, state=state) as looked:
        await expect(looked.page.locator("#instances li")).to_have_count(6)
        await looked.page.locator(".open").first.click()
        await expect(looked.page.locator(".detail")).to_be_visible()
        await expect(looked.page.get_by_role("log")).to_contain_text(
            "<script>window.hacked=1</script>"
        )

        assert await looked.page.evaluate("window.hacked") is None
        assert await looked.page.locator("img").count() == 1  # the page's own image
        assert await looked.page.locator("script").count() == 1
        assert not any("/x" in url for url in looked.asked)
