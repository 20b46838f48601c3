"""A real browser for tests: Chromium from the system's packages, driven by Playwright. `make browser` installs it."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Starts a browser. Skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; `make browser` installs it where apt-get is")
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed; `make setup` installs it")
    with launched() as browser:
        yield browser


@contextmanager
def launched() -> Iterator[Any]:
    """Starts a browser without a window."""
    from playwright import sync_api as driver

    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


class Pages:
    """Opens pages, each in a context of its own, and remembers what went wrong in them: errors of scripts, refusals of
    the policy, dialogs, and requests to anywhere else.

    Args:
        browser: The browser.
    """

    def __init__(self, browser: Any):
        self._browser = browser
        self._contexts: list[Any] = []
        self.faults: list[str] = []
        self.requests: list[str] = []

    def open(self, address: str, **settings: Any) -> Any:
        """Opens an address; settings such as `viewport` and `color_scheme` are those of Playwright's contexts."""
        context = self._browser.new_context(**settings)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("dialog", lambda dialog: (self.faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(address)
        return page

    def _note(self, message: Any) -> None:
        gone = re.search("net::ERR_(CONNECTION|INCOMPLETE|EMPTY)", message.text)  # a server that ended before its page
        if message.type in ("error", "warning") and not gone:
            self.faults.append(message.text)

    def close(self) -> None:
        for context in self._contexts:
            context.close()
