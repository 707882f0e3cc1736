"""Pages in a real browser, and what goes wrong in them."""

import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from rbdc.report.page import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
EVIL = '</script><img src=x onerror="document.title=\'hurt\'"> & "co" | *'


class Visit:
    """A page in the browser, and what went wrong in it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", lambda message: self._problem(message.text))
        page.on("pageerror", lambda error: self._problem(str(error)))
        page.on("request", lambda request: self._asked(request.url))
        self.address = address
        page.goto(address)
        page.wait_for_selector("body[data-ready]")

    def _problem(self, text: str) -> None:
        self.problems.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"asked for {url}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def points(self, chart: str) -> list[Any]:
        """The traces of a chart."""
        script = f"document.querySelector('[data-chart={chart}]').data"
        return list(self.page.evaluate(f"JSON.parse(JSON.stringify({script}))"))


def visit(browser: Browser, folders: list[Path], tmp_path: Path, **window: Any) -> Visit:
    page = write_report(folders, tmp_path / "report.html")
    return Visit(browser.new_page(**window), page.as_uri())
