"""What `longleaf doctor` says of the surroundings: a `.env`, proxies, the port, the source of a model.

Each is tried as the service does it: the API's address by its own transport, the port by listening on it, the
hub and the package index by the libraries that fetch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx

from cli.finding import Finding, ask
from cli.settings import Settings, SettingsError
from jobs.listening import CannotListen, has_ipv6, listen
from jobs.loopback import in_url
from jobs.transport import checked_proxy, http_client

ANSWER_S = 3.0
"""What has the port may be anything, and need not answer."""
_OURS = re.compile(r"(?:export\s+)?(LONGLEAF_\w+|REDIS_URL)\s*=", re.ASCII)
_SOURCE = """
import json, sys
from worker.model_folder import ModelError
from worker.models import check_source
try:
    print(json.dumps({"source": check_source(sys.argv[1])}))
except ModelError as error:
    sys.exit(str(error))
"""


def environment(_: Settings) -> Finding:
    """What the environment says that is another program's, and what a `.env` says that nobody reads."""
    try:
        lines = Path(".env").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    unread = [found[1] for line in lines if (found := _OURS.match(line.strip()))]
    if unread:
        mend = "`set -a; . ./.env; set +a` puts it into the environment, if it is yours"
        return Finding("environment", "warn", f"{', '.join(unread)} in .env here is not read", mend)
    theirs = os.environ.get("LOG_FORMAT", "")
    if theirs.lower() not in ("", "text", "json"):
        mend = "LOG_FORMAT=text or LOG_FORMAT=json is taken"
        return Finding("environment", "warn", f"LOG_FORMAT={theirs!r} is passed over", mend)
    count = sum(name.startswith("LONGLEAF_") for name in os.environ)
    return Finding("environment", "ok", f"{count} LONGLEAF_ variables" if count else "as it comes")


def proxy(settings: Settings) -> Finding:
    """Whether the proxies that are set can be used, and whether they take what is meant for this machine."""
    found = {kind: value for kind, value in getproxies().items() if kind in ("http", "https", "all")}
    if not found:
        return Finding("proxy", "ok", "none")
    try:
        http_client(settings.api_url, httpx.Timeout(ANSWER_S)).close()
        proxies = [checked_proxy(kind, value) for kind, value in found.items()]
    except SettingsError as error:
        return Finding("proxy", "bad", str(error), "correct it, or unset it")
    named = ", ".join(dict.fromkeys(str(one).removeprefix("the proxy ") for one in proxies))
    if not proxy_bypass("127.0.0.1"):
        mend = "Longleaf asks this machine directly; for curl and others set no_proxy=localhost,127.0.0.1,::1"
        return Finding("proxy", "warn", f"{named} would be asked for 127.0.0.1 too", mend)
    return Finding("proxy", "ok", named)


def port(settings: Settings) -> Finding:
    where = f"{in_url(settings.host)}:{settings.port}"
    try:
        for sock in listen(settings.host, settings.port):
            sock.close()
    except CannotListen as error:
        if error.in_use and _is_longleaf(settings):
            return Finding("port", "ok", f"{where}: Longleaf answers there")
        return Finding("port", "warn" if error.in_use else "bad", error.why, error.mend)
    return Finding("port", "ok", f"{where} is free" + ("" if has_ipv6() else "; no IPv6 here"))


def model_source(settings: Settings) -> Finding:
    """Whether a model that is not here can be had."""
    if (settings.model_folder / "config.json").is_file():
        return Finding("model's source", "ok", "not needed: the model is here")
    found, error = ask(_SOURCE, settings.model)
    if error:
        return Finding("model's source", "bad", error)
    return Finding("model's source", "ok", f"{found['source']} answers")


def _is_longleaf(settings: Settings) -> bool:
    url = f"http://{in_url(settings.host)}:{settings.port}"
    try:
        with http_client(url, httpx.Timeout(ANSWER_S)) as http:
            return bool(http.get("/openapi.json").json()["info"]["title"] == "Longleaf")
    except (httpx.HTTPError, SettingsError, ValueError, KeyError, TypeError):
        return False
