"""`Middleware`: what stands around an application and sees its requests. Decides nothing about them."""

from abc import ABC, abstractmethod
from typing import ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send


class Middleware(ABC):
    """Can be put around an application.

    Attributes:
        SCOPES: the kinds of connections that it sees; others go straight to the application.
    """

    SCOPES: ClassVar[tuple[str, ...]] = ("http",)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Return the application with this around it."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in self.SCOPES:
                await self.serve(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return handle

    @abstractmethod
    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application answer it."""
