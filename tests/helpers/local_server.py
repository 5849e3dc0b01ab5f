"""A server on this machine, for tests that talk to a service."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # connections at once; the default, 5, loses some of a burst


@contextmanager
def serve(
    handler: type[http.server.BaseHTTPRequestHandler],
    **attributes: Any,  # what every handler of this server has
) -> Iterator[str]:
    "Address of a server on a free port"
    quiet = {"log_message": lambda *_: None}
    own = type(handler.__name__, (handler,), quiet | attributes)
    server = Server(("127.0.0.1", 0), own)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
