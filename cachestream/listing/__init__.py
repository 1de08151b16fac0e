"""Listings: the sorted names of the objects that URLs and patterns stand for, at once or page by page."""
