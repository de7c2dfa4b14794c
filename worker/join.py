"""A worker on another machine, before it starts: the API takes it, the Redis is the API's, the model is here.

Each of the three is looked at once and refused with what to do: a worker that started without one of them
would wait for ever, or fail the jobs that it takes.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import httpx
from pydantic import BaseModel, ValidationError
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import PROTOCOL, VERSION
from jobs.settings import ModelId
from jobs.transport import http_client, in_words, proxy_for
from worker.redis_server import CannotStart, shown, wait_for_redis
from worker.settings import Settings
from worker.stop import StopRequest

SIGN_ON_S = httpx.Timeout(15.0, connect=5.0)
REDIS_PATIENCE_S = 10.0
_MAKE_TOKEN = (
    "on the API's host `longleaf keys create --scope worker` makes a token; give it to this machine as "
    "LONGLEAF_WORKER_TOKEN or in a file, with --token-file"
)


class Welcome(BaseModel):
    """What the API answers to a machine that it lets work."""

    version: str
    protocol: int
    model: ModelId
    mark: str
    """A key that the API has just left in its Redis."""


def join(settings: Settings) -> Settings:
    """The settings with which the worker may start; without a model of its own it serves the API's default.

    Raises:
        CannotStart: the API, Redis or the model is not to be had; the message says which, and what to do.
        SettingsError: the file of the token cannot be read.
    """
    welcome = sign_on(settings.api, settings.token())
    _check_redis(settings, welcome)
    chosen = settings
    if "model" not in settings.model_fields_set:
        chosen = settings.model_copy(update={"model": welcome.model})
    _fetch_model(chosen)
    return chosen


def sign_on(api: str, token: str | None) -> Welcome:
    """Ask the API to be a worker. Raises CannotStart, and SettingsError for a proxy that cannot be used."""
    body = {"host": socket.gethostname(), "version": VERSION, "protocol": PROTOCOL}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with http_client(api, SIGN_ON_S, headers) as http:
            answer = http.post("/v1/workers", json=body)
    except httpx.TransportError as error:
        why, proxy = in_words(error), proxy_for(api)
        if "certificate" in why:
            mend = "SSL_CERT_FILE names the certificate of an authority of your own"
        elif proxy is not None:
            mend = f"it was asked through {proxy}: no_proxy names the hosts that are asked directly"
        else:
            mend = "check --api, and that the API there listens for others (LONGLEAF_HOST)"
        raise CannotStart(f"no API at {api} ({why}); {mend}") from error
    if answer.status_code == 200:
        try:
            return Welcome.model_validate_json(answer.content)
        except ValidationError as error:
            raise CannotStart(f"{api} does not answer as Longleaf does; check --api") from error
    raise CannotStart(_refusal(api, answer, token))


def _refusal(api: str, answer: httpx.Response, token: str | None) -> str:
    try:
        body = answer.json()
        code, detail = str(body["code"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        code, detail = "", f"status {answer.status_code} without an explanation"
    if answer.status_code == 401 and token is None:
        return f"the API at {api} asks for a worker's token: {_MAKE_TOKEN}"
    if answer.status_code in (401, 403):
        return f"the API at {api} refuses the token of this worker ({detail}): {_MAKE_TOKEN}"
    if code in ("", "not_found", "method_not_allowed"):
        return f"{api} cannot be joined ({detail}): is it Longleaf {VERSION}, as here? Check --api"
    return f"the API at {api} refuses: {detail}"


def _check_redis(settings: Settings, welcome: Welcome) -> None:
    """Raises CannotStart where Redis does not answer, or is not the one in which the API left its mark."""
    stop = StopRequest()
    with Redis.from_url(
        settings.redis_url, socket_timeout=5, socket_connect_timeout=5, retry=Retry(NoBackoff(), 0)
    ) as redis:
        wait_for_redis(redis, settings.redis_url, stop, REDIS_PATIENCE_S)
        if not redis.exists(welcome.mark):
            raise CannotStart(
                f"the Redis at {shown(settings.redis_url)} is not the one that the API at {settings.api} "
                "uses: take the address, with the number of the database, that REDIS_URL has there"
            )


def _fetch_model(settings: Settings) -> None:
    """Raises CannotStart where the model is neither here nor can be made."""
    # In a process of its own: making one out of a GGUF loads MLX.
    command = [sys.executable, "-m", "worker.models", "pull", settings.model]
    command += ["--models-dir", str(settings.models)]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
        raise CannotStart(
            f"the model {settings.model} is not in {settings.models} and could not be made (see above): copy "
            "its folder there, or serve another one with --model"
        )
