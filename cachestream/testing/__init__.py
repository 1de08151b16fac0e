"""Checks that a source keeps the promises of the `Source` protocol; cachestream's own sources pass them.

    from cachestream.testing import check_source

    def test_my_source_keeps_the_protocol():
        check_source(lambda: MySource("s3://bucket/small"), secrets=["the password"])

Each check raises an AssertionError that names the promise, the result, and the remedy.
"""

from __future__ import annotations

from cachestream.testing.checks import CHECKS, SourceChecks, check_source

__all__ = ["CHECKS", "SourceChecks", "check_source"]
