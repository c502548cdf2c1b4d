"""Nobody's own models but a test's: the data folder of whoever runs the suite is left alone."""

import os
import tempfile

os.environ["VPLAN_HOME"] = tempfile.mkdtemp(prefix="vplan-tests-")
