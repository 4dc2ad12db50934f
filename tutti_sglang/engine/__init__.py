"""HOW bytes move: engines behind one protocol, and the staging memory that they move bytes through."""

from tutti_sglang.engine.base import Engine
from tutti_sglang.engine.batch import IOCTX_DTYPE, Batch, IoClass, Operation, Results, Ticket

__all__ = ["IOCTX_DTYPE", "Batch", "Engine", "IoClass", "Operation", "Results", "Ticket"]
