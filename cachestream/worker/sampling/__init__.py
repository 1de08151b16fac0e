"""A sampling process: it fetches units, decodes and transforms their samples, and publishes them as shards."""
