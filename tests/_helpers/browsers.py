"""The browsers with which a page can be looked at."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
"""Commands of Chromium, which runs without a display."""
