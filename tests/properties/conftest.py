"""Hypothesis for this folder: no deadlines, since a busy machine is no fault of the code, and no files left behind."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

settings.register_profile("properties", deadline=None, database=None)
settings.load_profile("properties")
