"""How the command and workers reach an API over HTTP, and what went wrong in plain words.

This machine is asked directly, whatever proxy is set: the document would leave the machine. Any other host is
asked through the proxy of the environment, or of macOS's settings, unless `no_proxy` names it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import ssl
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies, getproxies_environment, proxy_bypass

import httpx

from jobs.loopback import address_of, bare, is_here
from jobs.settings import SettingsError, without_password

_SCHEMES = ("http", "https", "socks5", "socks5h")
_LOCAL_NETWORK = (
    " (on macOS 15 and later System Settings → Privacy & Security → Local Network lets this program in)"
)


@dataclass(frozen=True)
class Proxy:
    url: str
    named_by: str
    """The variable, or whose settings it is from."""

    def __str__(self) -> str:
        return f"the proxy {without_password(self.url)} ({self.named_by})"


def http_client(url: str, timeout: httpx.Timeout, headers: dict[str, str] | None = None) -> httpx.Client:
    """A client of the API at `url`. Raises SettingsError for a proxy or certificates that cannot be used."""
    proxy = proxy_for(url)
    needs_certificates = any(link.startswith("https:") for link in (url, proxy.url if proxy else ""))
    try:
        transport = httpx.HTTPTransport(verify=needs_certificates, proxy=proxy.url if proxy else None)
    except OSError as error:
        name = "SSL_CERT_FILE" if os.environ.get("SSL_CERT_FILE") else "SSL_CERT_DIR"
        raise SettingsError(
            f"{name}={os.environ.get(name, '')!r} is not accepted: no certificates can be read there "
            f"({error.strerror or 'it holds none'})"
        ) from None
    return httpx.Client(base_url=url, transport=transport, timeout=timeout, headers=headers)


def proxy_for(url: str) -> Proxy | None:
    """The proxy that an address is asked through. Raises SettingsError where that cannot be used."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_here(host) or _is_spared(bare(host), parts.port):
        return None
    found = getproxies()
    kind = parts.scheme if found.get(parts.scheme) else "all"
    return checked_proxy(kind, found[kind]) if found.get(kind) else None


def checked_proxy(kind: str, value: str) -> Proxy:
    """The proxy that a value names. Raises SettingsError where that cannot be used."""
    names = (f"{kind}_proxy", f"{kind}_proxy".upper())
    named_by = next((name for name in names if os.environ.get(name)), "this system's network settings")
    url = value.strip() if "://" in value else f"http://{value.strip()}"
    # What GNOME and others write for any SOCKS.
    url = re.sub(r"^socks://", "socks5://", url)
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
        httpx.Proxy(url)
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise SettingsError(
            f"{named_by}={without_password(value)!r} is no proxy that can be used: http://HOST:PORT, "
            "https://HOST:PORT or socks5://HOST:PORT is accepted, an IPv6 address in brackets"
        )
    return Proxy(url, named_by)


def _is_spared(host: str, port: int | None) -> bool:
    """Whether `no_proxy`, or the exceptions in macOS's settings, name a host."""
    found = getproxies_environment()
    if not found:
        return bool(proxy_bypass(host))
    address = address_of(host)
    for entry in re.split(r"[\s,]+", found.get("no", "").lower()):
        if entry == "*":
            return True
        if address is not None:
            try:
                if address in ipaddress.ip_network(entry.replace("[", "").replace("]", ""), strict=False):
                    return True
            except ValueError:
                pass
        name, _, its_port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
        name = name.removeprefix("*").strip(".")
        if name and its_port in ("", str(port)) and (host == name or host.endswith(f".{name}")):
            return True
    return False


def in_words(error: BaseException) -> str:
    """Why there was no answer, as one would say it aloud."""
    inner: BaseException | None = error
    while inner is not None:
        if said := _cause(inner):
            return said
        inner = inner.__cause__ or inner.__context__
    kind = type(error).__name__
    if kind == "RemoteProtocolError":
        closed = "disconnected" in str(error)
        return "it closed the connection without an answer" if closed else "it does not speak HTTP there"
    if kind in ("ConnectError", "ReadError", "WriteError", "CloseError"):
        return "no connection" if kind == "ConnectError" else "the connection was cut"
    return (str(error) or kind).splitlines()[0]


def _cause(error: BaseException) -> str | None:
    """What one error of a chain says, where that is enough."""
    # By name: httpx, httpcore below it and the model hub's own copy of both call their errors alike.
    kind = type(error).__name__
    if kind == "ProxyError":
        return f"the proxy refuses: {error}"
    if kind == "ConnectTimeout":
        return "no connection in time"
    if kind in ("ReadTimeout", "WriteTimeout", "PoolTimeout"):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS there; is it http:// and not https://?"
    if isinstance(error, socket.gaierror):
        is_down = error.errno == socket.EAI_AGAIN
        return "no name server answers" if is_down else "its name has no address"
    if isinstance(error, UnicodeError):
        return "its name can be no host's"
    if isinstance(error, OSError) and error.errno is not None:
        is_hidden = error.errno == errno.EHOSTUNREACH and sys.platform == "darwin"
        return os.strerror(error.errno) + (_LOCAL_NETWORK if is_hidden else "")
    return None
