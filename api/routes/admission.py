"""Whether a job may be accepted: its documents, its model, and whether it fits the model's context."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from api.addresses import may_call
from api.documents.tokens import ModelFolder
from api.models import Document
from api.problems import ApiError, shown
from api.routes.documents import not_found
from api.services import Services
from jobs import JobSpec, Warm, WorkerStatus
from prompts import PromptError, instructions


def known_models(services: Services, workers: list[WorkerStatus]) -> list[str]:
    """The default, what live workers serve, and the model folders of this host; the default first."""
    default = services.settings.model
    others = {folder.id for folder in services.folders.all()} | {status.model for status in workers}
    return [default, *sorted(others - {default})]


def context_tokens(model: str, folder: ModelFolder | None, workers: list[WorkerStatus]) -> int | None:
    """As the workers that serve it say, else as the model's config says; None while nobody knows."""
    cards = [s.card.context_tokens for s in workers if s.card is not None and s.model == model]
    return max(cards) if cards else folder.context_tokens if folder else None


@dataclass(frozen=True, slots=True)
class Found:
    """What a spec names, and who is there for it."""

    documents: list[Document]
    model: str
    folder: ModelFolder | None
    """None where the model's folder is not on this host: its tokens cannot be counted here."""
    context_tokens: int | None
    workers: list[WorkerStatus]


def admit(services: Services, tenant: str, spec: JobSpec) -> str:
    """The id of the model that the job will run on.

    Raises:
        ApiError: 404 for an unknown document or model, 413 for a job over the model's context, 422 for a
            callback to an address that may not be called, or for thinking of a model that cannot.
    """
    found = look_up(services, tenant, spec)
    if found.folder is not None and found.context_tokens is not None:
        _check_fit(services, spec, found.documents, found.folder, found.context_tokens)
    return found.model


def look_up(services: Services, tenant: str, spec: JobSpec) -> Found:
    """The same without a look at the context. Raises ApiError 404 or 422."""
    _check_callback(services, spec)
    documents = []
    for index, document_id in enumerate(spec.documents):
        document = services.documents.get(tenant, document_id)
        if document is None:
            raise not_found(document_id, f"documents[{index}]")
        documents.append(document)
    workers = services.workers()
    models = known_models(services, workers)
    model = spec.model or services.settings.model
    if model not in models:
        raise ApiError(
            404,
            "unknown_model",
            f"there is no model {shown(model)}; known are {', '.join(models)}",
            param="model",
            params={"model": model[:255], "models": models},
        )
    _check_thinking(spec, model, workers)
    folder = services.folders.get(model)
    return Found(documents, model, folder, context_tokens(model, folder, workers), workers)


def prompt_tokens(services: Services, spec: JobSpec, documents: list[Document], folder: ModelFolder) -> int:
    """Tokens of the longest prompt of a job, as its worker will build it.

    Raises:
        ApiError: 422 if no prompt can be made for the model.
    """
    try:
        prompts = services.folders.prompts(folder)
    except PromptError as error:
        raise ApiError(422, error.code, f"model {folder.id}: {error}", param="model") from None
    counted = [(document.name, services.num_tokens(document, folder)) for document in documents]
    tails = (prompts.count_tail(text, spec.thinking) for text in _instructions(spec))
    return prompts.count_head(counted, spec.thinking) + max(tails)


def num_outputs(spec: JobSpec) -> int:
    return 0 if isinstance(spec, Warm) else len(_instructions(spec))


def _check_callback(services: Services, spec: JobSpec) -> None:
    """Refuse what is clear from the URL itself; a name is checked when it is called."""
    host = urlsplit(spec.callback_url or "").hostname
    networks = services.settings.callback_networks
    try:
        if host is None or may_call(host, networks):
            return
    except ValueError:  # a name
        return
    raise ApiError(
        422,
        "callback_refused",
        f"callback_url leads to {host}, and callbacks go to public addresses only: use another one, or have "
        "LONGLEAF_CALLBACK_NETWORKS allow its network",
        param="callback_url",
        params={"address": host},
    )


def _check_thinking(spec: JobSpec, model: str, workers: list[WorkerStatus]) -> None:
    """Refuse what every worker of the model says that it cannot do; where none says, the job may come."""
    said = {status.card.can_think for status in workers if status.card is not None and status.model == model}
    if spec.thinking and said == {False}:
        raise ApiError(
            422,
            "cannot_think",
            f"thinking is true, and {model} has no switch for it: leave it out, or name a model that can",
            param="thinking",
            params={"model": model},
        )


def _check_fit(
    services: Services, spec: JobSpec, documents: list[Document], folder: ModelFolder, context: int
) -> None:
    prompt = prompt_tokens(services, spec, documents, folder)
    if prompt + spec.max_output_tokens > context:
        raise ApiError(
            413,
            "context_exceeded",
            f"the prompt has {prompt} tokens and the output may have {spec.max_output_tokens}, together "
            f"{prompt + spec.max_output_tokens}; the context of {folder.id} is {context} tokens: "
            "send less text, lower max_output_tokens or choose a model with a longer context",
            param="documents",
            params={
                "prompt_tokens": prompt,
                "max_output_tokens": spec.max_output_tokens,
                "context_tokens": context,
                "model": folder.id,
            },
        )


def _instructions(spec: JobSpec) -> list[str]:
    """What is asked about the documents; each is a prompt of its own."""
    return [""] if isinstance(spec, Warm) else [text for _, text in instructions(spec)]
