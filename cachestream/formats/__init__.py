"""Formats of files, a module each. They use `cachestream.sources.api` alone, as those of other packages
do.
"""
