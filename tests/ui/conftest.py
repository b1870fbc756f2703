"""Real browser, and real proxies for it."""

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.ui.browsing import Stack, Tabs, stack_of


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not work as root, such as in a container.
        launched = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield launched
        await launched.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    async with stack_of() as started:
        assert await started.chat("first") == 200
        yield started


@pytest.fixture
def tab(browser: Browser) -> Tabs:
    return Tabs(browser)
