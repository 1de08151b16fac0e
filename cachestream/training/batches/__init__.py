"""From the shards of a segment to its batches, at the speed of memory."""
