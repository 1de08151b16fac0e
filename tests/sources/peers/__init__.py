"""Small data sets that the peers' own libraries wrote, kept as they wrote them: see `write.py`."""
