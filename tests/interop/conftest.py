"""Modules of these tests by their plain names, which `make_golden.py` also runs by."""
from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
