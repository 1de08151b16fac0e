"""Remote data, sampled as it lies: sources, decoding, retries."""
