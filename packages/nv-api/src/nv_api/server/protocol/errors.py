"""The shape of an error."""

from nv_api.server.protocol.fields import Given


class ErrorDetail(Given):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Given):
    """Every error of every route."""

    error: ErrorDetail
