"""Fixtures of the tests of launch scripts."""
from __future__ import annotations

from launch.machines import machines as machines
