"""A real browser without a window: Debian's Chromium, or Chrome, driven by Selenium."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
CHROMEDRIVER = shutil.which("chromedriver")
# alone on its machine: no update, no synchronisation, no first page
ALONE = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
--disable-background-networking --disable-component-update --disable-sync""".split()


def missing_browser() -> str | None:
    "What has to be installed before `open_browser` can work; none: nothing"
    if not (CHROMIUM and CHROMEDRIVER):
        return "no Chromium: apt-get install chromium chromium-driver"
    if importlib.util.find_spec("selenium") is None:
        return "no Selenium: pip install selenium"
    return None


@contextmanager
def open_browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator:
    "A Selenium driver with a profile of its own; closed at the end of the block"
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in (*ALONE, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=str(CHROMEDRIVER))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
