"""What a request is refused with: a status and an error in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from ssdevice.errors import BundleError, ContextOverflowError, InputError, SSDeviceError

INVALID, SERVER = "invalid_request_error", "server_error"
log = logging.getLogger(__name__)


class Refusal(SSDeviceError):
    """A request that is not answered. ``kind`` and ``code``: OpenAI's words; ``param``: the parameter at fault."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind, self.code, self.param = kind, code, param
        self.headers = headers

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """The refusal for an error of any kind; one that nobody foresaw is logged."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, ContextOverflowError):
            return cls(str(error), code="context_length_exceeded", param="messages")
        if isinstance(error, InputError) and not isinstance(error, BundleError):
            return cls(str(error))
        if isinstance(error, SSDeviceError):
            return cls(str(error), 500, kind=SERVER)
        log.error("a request failed", exc_info=error)  # its traceback is not for clients
        return cls(f"the server failed ({type(error).__name__}); its log says more", 500, kind=SERVER)

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)
