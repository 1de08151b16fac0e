"""`cachestream diagnose`: what holds up filling from a source, and training on it."""
