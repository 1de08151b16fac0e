"""Servers, networks, hosts and processes for tests: real ones, which fail on command."""
