"""API keys: read from the environment, and kept out of configs and messages."""

from __future__ import annotations

import os

from launch.errors import UserError


def api_key(setting: str, variable: str) -> str:
    """The key that an environment variable holds; ``setting`` names the config's key for it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"{setting}: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{setting}: {variable} holds characters that no API key has")
    return key
