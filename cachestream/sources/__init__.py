"""Sources: data sets as numbered units, and the samples in them."""
