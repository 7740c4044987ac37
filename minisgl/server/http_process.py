"""An API server as a process: how it is started. What it runs (http_server.py) is imported in the process itself."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from minisgl.addresses import Addresses

from .process import Reporter

BACKLOG = 2048
"""Connections that may wait to be accepted: what a burst of clients finds while the loop is busy."""


@dataclass(frozen=True, slots=True)
class ApiServerConfig:
    """What one API server is started with. ``model`` is what clients call the model, ``created`` when it came (Unix
    time), which all API servers say alike.
    """

    addresses: Addresses
    index: int
    model: str
    created: int
    log_requests: bool = True


def run_api_server(config: ApiServerConfig, sock: socket.socket, reporter: Reporter) -> None:
    """Reports ready when everything is loaded; serves on ``sock`` once the launcher says so, until SIGTERM."""
    reporter.progress("loading the API")
    from .api_server import ModelFacts, create_app
    from .frontend import FrontendManager
    from .http_server import HttpServer

    frontend = FrontendManager(config.addresses, config.index)
    reporter.ready()
    facts = ModelFacts(config.model, config.created, **reporter.wait_go())
    HttpServer(create_app(frontend, facts, config.log_requests), frontend, BACKLOG).run_on(sock)
