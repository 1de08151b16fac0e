"""Filling with the help of a Ray cluster: units read by actors, and one filling for several caches."""
