"""GET /v1/models, /v1/models/{id}."""

from fastapi import APIRouter
from starlette.requests import Request

from nv_api.server.adapters import ServedModel
from nv_api.server.protocol.models import ModelCard, ModelList
from nv_api.server.routes.described import OF_READS, errors
from nv_api.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models", responses=errors(*OF_READS))
async def list_models(request: Request) -> ModelList:
    """Every name of the model, and its adapters."""
    service = service_of(request)
    _check_loaded(service)
    return ModelList(data=[_card(service, service.model_of(name)) for name in service.names])


@router.get("/v1/models/{name:path}", responses=errors(404, *OF_READS))
async def show_model(request: Request, name: str) -> ModelCard:
    """One name of the model, or one adapter."""
    service = service_of(request)
    _check_loaded(service)
    return _card(service, service.model_of(name))


def _check_loaded(service: Service) -> None:
    if (problem := service.lifecycle.problem()) is not None:
        raise problem


def _card(service: Service, model: ServedModel) -> ModelCard:
    name, lora = model
    return ModelCard(
        id=name,
        created=service.started_at,
        root=service.options.model if lora is None else lora.lora_path,
        parent=None if lora is None else lora.base_model_name or service.options.names[0],
        max_model_len=service.llm.facts.max_model_len,
    )
