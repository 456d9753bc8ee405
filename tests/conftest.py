"""What holds for every test: none asserts on time, so none of hypothesis' examples has a deadline either."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("pagewarden", deadline=None)
settings.load_profile("pagewarden")
