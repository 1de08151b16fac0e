"""No error and no repr shows keys, user-info or signed URLs, also before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from cachestream.errors import ConfigError
from cachestream.listing.manifest import Manifest
from cachestream.sources.arrays import ArrayLocation
from cachestream.sources.open import Unopened, open_source
from cachestream.transport.remote import Remote


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("s3://bucket/x", {"storage_options": "key=CANARY"}),
        ("s3://bucket/x", {"storage_options": [("secret", "CANARY")]}),
        (["s3://a/x", "s3://a/y"], {"manifest": {"storage_options": {"secret": "CANARY"}}}),
        ("s3://bucket/x", {"manifest": "https://host/list?signature=CANARY"}),
    ],
)
def test_a_refusal_of_options_shows_no_secret_that_they_hold(what: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"give (True, or )?a dict") as caught:
        open_source(what, **options)
    assert "CANARY" not in str(caught.value)


def test_no_repr_of_what_will_be_opened_shows_a_secret() -> None:
    url = "https://user:CANARY@host/a.npy?signature=CANARY"
    manifest = Manifest(url, base=url, storage_options={"secret": "CANARY"})
    assert repr(manifest) == "Manifest('https://host/a.npy', base='https://host/a.npy')"
    remote = Remote(url, {"secret": "CANARY"})
    kept: list[object] = [Unopened(url, {"storage_options": {"secret": "CANARY"}})]
    kept += [ArrayLocation(remote, url, None)]
    assert "CANARY" not in repr([manifest, remote, *kept])
