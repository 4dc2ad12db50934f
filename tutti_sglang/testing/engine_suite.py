"""The conformance suite that every engine passes: subclass it as `TestX` and say in `create` how one is made."""

from tutti_sglang.testing.engine_faults import EngineFaults
from tutti_sglang.testing.engine_limits import EngineLimits
from tutti_sglang.testing.engine_results import EngineResults


class EngineSuite(EngineResults, EngineLimits, EngineFaults):
    """Results, limits, faults. Needs pytest; call `pytest.register_assert_rewrite("tutti_sglang.testing")` for readable
    failures."""
