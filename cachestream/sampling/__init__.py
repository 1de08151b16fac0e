"""The background: draw units, fetch, decode, pack into shards."""
