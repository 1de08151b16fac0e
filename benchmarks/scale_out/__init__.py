"""What to choose when 8 to 4,096 nodes train on one remote data set through bounded caches: `python -m benchmarks.scale_out`.

Every size and arrangement is simulated by `cluster`, with the speeds of nodes in a data centre. With the speeds that
`benchmarks.cluster` measured on one machine, read from results/cluster.json, the model is compared with the runs of three to five
caches there; without that file the run says that it is not.

Keys of "figures" in results/cluster.json, a list with the value of each round, as in every record:

- for `Calibration`: `remote_bytes_per_s` (one node from the remote), `copy_bytes_per_s` (a shard from node to node),
  `shard_overhead_s` (publishing a shard, without fetching and decoding), `decode_s` (a sample, one processor).
- for `check`, the runs that were measured: `num_shards`, `shard_bytes`, `fetched_bytes` (of a shard, from the remote),
  `samples_per_shard`, `limit_bytes` (of a cache), `processors` (of a node), `job_bytes_per_s` (from the remote, all nodes),
  and for 3 to 5 nodes, of "alone", "partition" or "share": `3 nodes, share / full_s` (from the first request
  until the cache of the median node is full) and `3 nodes, share / egress_bytes`.
"""
