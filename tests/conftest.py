"""Nobody's own models but a test's: the data folder of whoever runs the suite is left alone."""

import os
from pathlib import Path

os.environ["VPLAN_HOME"] = str(Path(__file__).parent / "nobody")
"""Never made: a test that keeps a model sets a folder of its own."""
