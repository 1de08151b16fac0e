"""`cachestream diagnose`: the stage that holds up filling from a source, or training on it."""
