"""Serve the report as a page that follows its runs: on this machine only, and read-only."""

import json
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rbdc.errors import RbdcError
from rbdc.report.page import read_state, render

ADDRESS, REFRESH_SECONDS = "127.0.0.1", 3.0


def make_server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server that is ready to serve, on `port` or, if that is 0, on a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # another site's name that leads here must not read what is here
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (ADDRESS, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path not in ("/", "/state.json"):
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                try:
                    self._answer(read_state(folders))
                except RbdcError as error:  # a run that was removed or damaged since
                    self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))

        def _answer(self, state: dict[str, Any]) -> None:
            if self.path == "/":
                page = render(state, refresh_seconds=REFRESH_SECONDS)
                self._send(page, "text/html; charset=utf-8")
            else:
                self._send(json.dumps(state), "application/json")

        def _send(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), OSError):  # a browser that has gone is no mistake
                super().handle_error(request, client_address)

    try:
        return Server((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        remedy = "Choose another, or leave --port out."
        raise RbdcError(f"port {port} cannot be used: {error}", remedy) from error
