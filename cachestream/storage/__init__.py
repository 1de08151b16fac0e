"""The local cache: shard files, their catalogue, limits, leases, eviction."""
