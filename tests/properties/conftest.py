"""Hypothesis for this folder: no deadlines, since a busy machine is no fault of the code, and no files left behind."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("properties", deadline=None, database=None)
settings.load_profile("properties")
