"""Settings for every test: nothing is timed, since the machine may be busy."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tutti_sglang.testing")  # the shipped suites fail as readably as tests

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
