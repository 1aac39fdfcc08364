"""The HostStore: the frozen base in host memory, one slab per layer."""
