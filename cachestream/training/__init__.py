"""Epochs: frozen data sets of the cache, batches at memory speed, ranks that agree."""
