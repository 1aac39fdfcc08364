"""From files on disk to slabs in host memory: shards, NF4, packing and the skeleton model."""
