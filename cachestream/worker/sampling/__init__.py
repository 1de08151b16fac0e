"""A sampling process: it fetches units, transforms their samples, and publishes them as shards."""
