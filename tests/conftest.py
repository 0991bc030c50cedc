"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

# A busy machine is no fault of an example: no deadline for each, no complaint about a slow start.
# Continuous integration runs the same examples every time; a developer explores new ones.
settings.register_profile(
    "rd2h",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("rd2h")
