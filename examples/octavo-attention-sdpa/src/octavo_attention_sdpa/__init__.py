"""Paged attention through torch's scaled_dot_product_attention: a third-party plugin of Octavo.

Importing this package registers nothing and imports no torch; the hook below is all that Octavo calls.
"""

from __future__ import annotations

from octavo import hookimpl
from octavo.catalog import Provider


@hookimpl
def register_attention_backends() -> list[Provider]:
    from octavo_attention_sdpa.provider import PROVIDER

    return [PROVIDER]
