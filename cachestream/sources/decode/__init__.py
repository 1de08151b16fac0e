"""Encoded bytes → the fields of a sample."""
