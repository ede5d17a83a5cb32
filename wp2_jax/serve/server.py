"""The server: page, WebSocket, health and metrics, as an ASGI application.

No name that a client sends reaches the file system: the page's files are read at the start. Browsers of other sites are
turned away by Origin and Host; who listens on more than the loopback device asks for a token.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import secrets
from collections.abc import AsyncIterator
from importlib import resources
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from wp2_jax.serve import messages, metrics, protocol
from wp2_jax.serve.connection import POLICY, TOO_SLOW, ClientLimits, Connection
from wp2_jax.serve.game import Game
from wp2_jax.serve.pictures import MAX_BYTES

log = logging.getLogger(__name__)
STUCK_SECONDS = 120.0
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may connect. `host` is where the server listens; with a `token` its name need not be known. `origins` are
    further pages, such as https://example.org, that may."""

    host: str = "127.0.0.1"
    token: str | None = None
    origins: tuple[str, ...] = ()
    connections: int = 64

    def refusal(self, connection: HTTPConnection, *, page: bool = False) -> str | None:
        """Why a request is turned away, None if it is not. The page itself is no secret and needs no token."""
        host = connection.headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if self.token is None and not (is_loopback(name) or name == self.host):
            return f"host {host!r} is not this server's name: use the address that it printed"
        origin = connection.headers.get("origin")
        own = {f"{scheme}://{host}" for scheme in ("http", "https")}
        if origin is not None and origin not in own and origin not in self.origins:
            return f"origin {origin!r} may not connect: start the server with --allow-origin to let it"
        if self.token is not None and not page:
            given = connection.query_params.get("token") or connection.headers.get("authorization", "").removeprefix(
                "Bearer "
            )
            if not secrets.compare_digest(given.encode(), self.token.encode()):
                return "the token is missing or wrong: use the address that the server printed"
        return None


def is_loopback(host: str) -> bool:
    """Whether a name or address is of the loopback device."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def application(game: Game, access: Access | None = None, limits: ClientLimits | None = None) -> Starlette:
    """The ASGI application; its end stops the engine of `game`."""
    access, limits = access or Access(), limits or ClientLimits()
    decoding = asyncio.Semaphore(1)
    connected: set[Connection] = set()
    engine = game.engine
    files = {
        f"/{path.name}": (path.read_bytes(), _TYPES[suffix])
        for path in resources.files("wp2_jax.serve").joinpath("web").iterdir()
        if (suffix := "." + path.name.rpartition(".")[2]) in _TYPES
    }

    async def page(request: Request) -> Response:
        refusal = access.refusal(request, page=True)
        if refusal:
            return PlainTextResponse(refusal, 403)
        path = "/index.html" if request.url.path == "/" else request.url.path
        if path not in files:
            return PlainTextResponse("there is no such page", 404)
        body, kind = files[path]
        return Response(body, media_type=kind, headers=_HEADERS)

    async def health(request: Request) -> Response:
        gauges = engine.numbers().gauges
        stuck = gauges["turn_busy_seconds"] > STUCK_SECONDS
        well = engine.status == "ready" and not stuck
        return JSONResponse({"status": "stuck" if stuck else engine.status} | gauges, 200 if well else 503)

    async def measured(request: Request) -> Response:
        refusal = access.refusal(request)
        if refusal:
            return PlainTextResponse(refusal, 403)
        return PlainTextResponse(metrics.text(engine.numbers(), len(connected)), media_type="text/plain; version=0.0.4")

    async def schema(request: Request) -> Response:
        return JSONResponse(protocol.schema())

    async def play(socket: WebSocket) -> None:
        refusal = access.refusal(socket)
        if refusal is None and len(connected) >= access.connections:
            refusal = f"{len(connected)} clients are connected, which is the most: try again later"
        if refusal:
            # Accepted first, or a browser would not be told the reason.
            log.warning("refused", extra={"reason": refusal})
            await socket.accept()
            await socket.send_text(protocol.dump(messages.Error(None, None, refusal)))
            await socket.close(TOO_SLOW if len(connected) >= access.connections else POLICY)
            return
        connection = Connection(game, socket, limits, decoding)
        connected.add(connection)
        try:
            await connection.run()
        finally:
            connected.discard(connection)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.stop)
        log.info("stopped")

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", health),
            Route("/metrics", measured),
            Route("/schema.json", schema),
            WebSocketRoute("/play", play),
            Route("/{path:path}", page),
        ],
    )


def server(app: Starlette) -> uvicorn.Server:
    """The application on uvicorn; `run(sockets=[...])` returns after SIGINT or SIGTERM."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            # Twice what is taken, so that a picture that is a little too large gets an answer. Pictures and video do
            # not get smaller by compression.
            ws_max_size=2 * MAX_BYTES,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=5,
        )
    )
