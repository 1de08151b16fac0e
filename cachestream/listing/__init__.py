"""URLs and patterns → the sorted names of remote objects, at once or page by page."""
