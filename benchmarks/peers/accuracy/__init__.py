"""Time to accuracy over a slow remote, from cachestream and from the peers: `python -m benchmarks.peers.accuracy`."""
