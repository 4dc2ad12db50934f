"""Settings for every test: nothing is timed, since the machine may be busy."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tutti_sglang.testing")  # the shipped suites fail as readably as tests

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run of all tests must stay short: what is marked so runs only when it is asked for."""
    if "matrix" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="takes minutes: run with -m matrix, servers by `make matrix`")
        for item in items:
            if item.get_closest_marker("matrix"):
                item.add_marker(skip)
