"""Sources: what a unit of a data set is, and the samples in it."""
