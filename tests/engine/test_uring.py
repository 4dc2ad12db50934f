"""The native engine passes the suite, over io_uring and with its threads, and falls from one to the other by itself."""

import pytest

from tutti_sglang.engine import Engine
from tutti_sglang.engine.uring import UringEngine, uring_refused
from tutti_sglang.kernels import native
from tutti_sglang.memory import Region
from tutti_sglang.testing.engine_suite import EngineSuite
from tutti_sglang.testing.faults import FaultPlan
from tutti_sglang.testing.rig import SEGMENT

if native.library() is None:
    pytest.skip(native.unavailable_reason(), allow_module_level=True)


class NativeSuite(EngineSuite):
    pool = False

    def create(self, memory: Region, *, depth: int, max_io: int, plan: FaultPlan | None = None) -> Engine:
        faults = plan.packed() if plan else None
        return UringEngine(SEGMENT, queue_depth=depth, max_io=max_io, staging=memory, faults=faults, pool=self.pool)


@pytest.mark.skipif(bool(uring_refused()), reason=uring_refused())
class TestUring(NativeSuite):
    pass


class TestPool(NativeSuite):
    pool = True
