"""Browser tabs, and a proxy for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import aiohttp
from playwright.async_api import Browser, Page

from epd.ui.state import UiState
from tests.requests import image, request, text
from tests.support.fake_instance import FakeInstance, decodes, encodes, prefills
from tests.support.programs import serving

QUICK = ("--probe-interval-s", "0.2")

PATIENT_MS = 30_000
"""Timeout of waits in the browser; generous for busy machines."""


@dataclass
class Looked:
    """Open page, and the problems that its browser reported.

    Attributes:
        wrong: console errors, including violations of the content security policy, and uncaught
            errors.
        asked: URLs that the page requested.
    """

    page: Page
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@dataclass
class Stack:
    """Proxy process and the instances behind it."""

    url: str
    encode: FakeInstance
    prefill: FakeInstance
    decode: FakeInstance

    async def chat(self, request_id: str = "one", *, stream: bool = False) -> int:
        body = {**request(image(), text()), "stream": stream}
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"{self.url}/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}
            ) as reply,
        ):
            await reply.read()
            return reply.status

    async def state(self) -> UiState:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/ui/state") as reply:
            return cast("UiState", await reply.json())


@asynccontextmanager
async def stack_of(*flags: str, env: dict[str, str] | None = None) -> AsyncIterator[Stack]:
    """Run a proxy with encode, prefill and decode instances."""
    e, p, d = (FakeInstance(chat) for chat in (encodes, prefills, decodes))
    async with AsyncExitStack() as opened:
        for one in (e, p, d):
            await opened.enter_async_context(one.running())
        urls = ("--encode-servers-urls", e.url, "--prefill-servers-urls", p.url)
        process = serving(*urls, "--decode-servers-urls", d.url, *QUICK, *flags, env=env)
        url, _ = await asyncio.to_thread(process.__enter__)
        opened.push_async_callback(asyncio.to_thread, process.__exit__, None, None, None)
        yield Stack(url, e, p, d)


class Tabs:
    """Opens pages: `async with tab(url) as looked`."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @asynccontextmanager
    async def __call__(
        self, url: str, *, width: int = 1280, state: object = None, **context: object
    ) -> AsyncIterator[Looked]:
        """Open a page in a new tab, and check that its browser reported no problem.

        Args:
            url: URL of the proxy.
            width: width of the window in pixels.
            state: state that replaces the proxy's own.
            context: options of the browser context, such as `color_scheme`.
        """
        opened = await self._browser.new_context(
            viewport={"width": width, "height": 800},
            **context,  # type: ignore[arg-type]
        )
        opened.set_default_timeout(PATIENT_MS)
        page = await opened.new_page()
        looked = Looked(page)
        page.on(
            "console",
            lambda said: (
                looked.wrong.append(said.text) if said.type in {"error", "warning"} else None
            ),
        )
        page.on("pageerror", lambda error: looked.wrong.append(str(error)))
        page.on("request", lambda asked: looked.asked.append(asked.url))
        if state is not None:
            await page.route("**/ui/state", lambda route: route.fulfill(json=state))
        try:
            await page.goto(f"{url}/ui")
            yield looked
            assert looked.wrong == []
        finally:
            await opened.close()
