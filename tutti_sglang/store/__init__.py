"""WHAT lies WHERE: namespaces, index, segments, eviction and the object store on top of them."""

from tutti_sglang.store.layers import Layers, Started
from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.objects import ABSENT, HERE, PEER, ObjectStore, Places
from tutti_sglang.store.stats import StoreStats
from tutti_sglang.store.target import HostRows, Target
from tutti_sglang.store.verify import VerifyReport

__all__ = [
    "ABSENT",
    "HERE",
    "PEER",
    "HostRows",
    "Layers",
    "Namespace",
    "ObjectStore",
    "Places",
    "Started",
    "StoreStats",
    "Target",
    "VerifyReport",
]
