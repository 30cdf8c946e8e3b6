"""Take the pictures of docs/page.md: `flockstep demo --page` in one terminal, this in another, near its end.

    python tests/support/page_pictures.py http://127.0.0.1:9402/ docs
"""

import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = {"page": 1400, "page-dark": 1400, "page-phone": 390}
"""The width of the window of each picture."""
HEIGHT = 1500


def main(url: str, folder: Path) -> None:
    """Write each picture of the page at `url` into the folder."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, width in PICTURES.items():
            colours: Literal["dark", "light"] = "dark" if name.endswith("dark") else "light"
            page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=colours)
            page.goto(url)
            page.wait_for_selector("#rounds tbody tr")
            page.screenshot(path=folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
