"""WHAT lies WHERE: namespaces, index, segments, eviction and the object store on top of them."""
