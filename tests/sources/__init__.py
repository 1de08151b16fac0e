"""Tests of the sources and what they are made of."""
