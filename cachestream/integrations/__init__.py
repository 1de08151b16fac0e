"""Integrations with other frameworks, one module each: the only modules that import them."""
