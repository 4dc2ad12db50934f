"""WHAT lies WHERE: namespaces, index, segments, eviction and the object store on top of them."""

from tutti_sglang.store.namespace import Namespace
from tutti_sglang.store.objects import Layers, ObjectStore, StoreStats
from tutti_sglang.store.verify import VerifyReport

__all__ = ["Layers", "Namespace", "ObjectStore", "StoreStats", "VerifyReport"]
