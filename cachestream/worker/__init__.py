"""The background: processes that sample a source into shards of the cache."""
