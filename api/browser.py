"""What a page from elsewhere may make a browser on this machine send: refused, where no key is shown.

Two ways lead here. A page may post a form, which needs nobody's leave (a file and a cancel are forms). And a
page's own name may come to resolve to 127.0.0.1 (DNS rebinding), which makes this API its own origin; what
gives that away is the Host header. A key closes both: no page has it.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request

from api.problems import ApiError
from jobs.loopback import address_of, bare, is_loopback

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def check(request: Request, allowed_hosts: Collection[str]) -> None:
    """Raises ApiError 403 for a Host that is not this machine, or a change that another site asks for."""
    host = request.headers.get("Host", "")
    name = _name(host)
    if host and not _is_ours(name) and name not in allowed_hosts:
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


def _is_ours(name: str) -> bool:
    """Whether a name is this machine's, whatever a name server says."""
    address = address_of(name)
    # 0.0.0.0 and :: are what a browser may call it too; no page can have an address for its name.
    return is_loopback(name) or (address is not None and address.is_unspecified)


def _name(host: str) -> str:
    """The host without its port, as `bare` spells it."""
    try:
        return bare(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return host.lower()
