"""What a page from elsewhere may make a browser on this machine send: refused, where no key is shown.

Two ways lead here. A page may post a form, which needs nobody's leave (a file and a cancel are forms). And a
page's own name may come to resolve to 127.0.0.1 (DNS rebinding), which makes this API its own origin; what
gives that away is the Host header. A key closes both: no page has it.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request

from api.addresses import is_loopback
from api.problems import ApiError

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def check(request: Request, allowed_hosts: Collection[str]) -> None:
    """Raises ApiError 403 for a Host that is not this machine, or a change that another site asks for."""
    host = request.headers.get("Host", "")
    name = _name(host)
    if host and not is_loopback(name) and name not in allowed_hosts:
        raise ApiError(
            403,
            "host_refused",
            f"the request is for the host {name!r} and this API serves localhost without a key: use "
            f"http://localhost, or set LONGLEAF_ALLOWED_HOSTS={name} if this name is yours",
            param="Host",
            params={"host": name},
        )
    if request.method in SAFE:
        return
    origin = request.headers.get("Origin")
    site = request.headers.get("Sec-Fetch-Site", "none")
    if origin is None and site in ("none", "same-origin"):
        return
    if origin is None or origin.partition("://")[2].lower() != host.lower():
        raise ApiError(
            403,
            "origin_refused",
            f"a page of {origin or 'another site'} asks for this and the API is {host}: without a key only "
            "its own pages may change something; send an API key instead",
            param="Origin",
            params={"origin": origin},
        )


def _name(host: str) -> str:
    """The host without its port, in lower case; an IPv6 address without brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host.lower()
