"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from nv_api.server.body import read_body
from nv_api.server.errors import losses
from nv_api.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from nv_api.server.routes.described import body_of, errors
from nv_api.server.service import Service, service_of

router = APIRouter()


@router.post(
    "/v1/load_lora_adapter",
    responses=errors(),
    openapi_extra=body_of(LoadAdapterRequest),
    response_class=PlainTextResponse,
)
async def load_adapter(request: Request) -> PlainTextResponse:
    """Offer one more adapter, if the server's options allow that."""
    service = _open_service(request)
    asked = await read_body(request, LoadAdapterRequest, service.options.max_body_bytes)
    name, path, in_place = asked.lora_name, asked.lora_path, bool(asked.load_inplace)
    with losses(service.llm):
        await service.adapters.load(service.llm, name, path, in_place=in_place)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    responses=errors(),
    openapi_extra=body_of(UnloadAdapterRequest),
    response_class=PlainTextResponse,
)
async def unload_adapter(request: Request) -> PlainTextResponse:
    """Offer an adapter no longer, if the server's options allow that."""
    service = _open_service(request)
    asked = await read_body(request, UnloadAdapterRequest, service.options.max_body_bytes)
    with losses(service.llm):
        await service.adapters.unload(service.llm, asked.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _open_service(request: Request) -> Service:
    """The service, if it takes requests and its adapters may change."""
    service = service_of(request)
    service.lifecycle.check_open()
    service.check_adapters_change()
    return service
