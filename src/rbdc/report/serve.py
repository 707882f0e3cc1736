"""Serve the report as a page that follows its runs: on this machine only, and read-only."""

import json
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
            elif self.path == "/":
                page = render(read_state(folders), refresh_seconds=REFRESH_SECONDS)
                self._send(page, "text/html; charset=utf-8")
            elif self.path == "/state.json":
                self._send(json.dumps(read_state(folders)), "application/json")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

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

    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        remedy = "Choose another, or leave --port out."
        raise RbdcError(f"port {port} cannot be used: {error}", remedy) from error
