"""The HTTP application: routes, and errors in OpenAI's shape for everything that goes wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from minisgl.message import ErrorInfo
from minisgl.version import __version__

from .answer import Answer, error_response, json_response
from .errors import ApiError, invalid, validation_error
from .frontend import FrontendManager
from .guard import BodyGuard
from .protocol import ChatBody, CompletionBody, GenerateBody
from .responses import Health, Model, ModelList
from .translate import Job, Translator


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API must know of the model: what it is called, since when it is served (Unix time), its context, its
    authors' sampling parameters.
    """

    name: str
    created: int
    max_seq_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)


def create_app(frontend: FrontendManager, facts: ModelFacts, log_requests: bool = True) -> FastAPI:
    """The application of one API server. ``frontend`` must be attached to the loop before the first request."""
    app = FastAPI(title="minisgl", version=__version__)
    translator = Translator(facts.name, facts.sampling_defaults)
    model = Model(facts.name, facts.created, facts.max_seq_len)

    def answer(job: Job) -> Answer:
        return Answer(frontend, job, log_requests)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody) -> Response:
        return answer(translator.chat(body))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        return answer(translator.completion(body))

    @app.post("/generate")
    async def generate(body: GenerateBody) -> Response:
        """The native endpoint: one prompt, text and token ids back. Streams with ``stream``."""
        return answer(translator.generate(body))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([model]))

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        translator.check_model(name)
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        if frontend.unhealthy is not None:
            return error_response(frontend.unhealthy)
        return json_response(Health(len(frontend)))

    @app.exception_handler(ApiError)
    async def on_api_error(_request: Request, error: ApiError) -> Response:
        return error_response(error.info)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        words = {
            404: f"There is nothing at {request.url.path}.",
            405: f"{request.method} is not allowed at {request.url.path}.",
        }
        info = invalid(words.get(error.status_code, str(error.detail)), status=error.status_code).info
        return error_response(info, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def on_fault(_request: Request, _error: Exception) -> Response:
        return error_response(ErrorInfo(message="The server has made a mistake; its log says more."))

    app.add_middleware(BodyGuard)
    return app
