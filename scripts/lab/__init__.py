"""Makes models, measurements and pages. Not installed, and not imported by the packages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository
