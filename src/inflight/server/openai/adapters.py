"""vLLM's endpoints to load and unload adapters at run time, if the operator allows it."""

from typing import ClassVar

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from inflight.contracts.api.errors import AdapterError
from inflight.server.serving.service import Service, service_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import StrictModel


class LoadAdapterRequest(StrictModel):
    """An adapter to load: its name, and its folder on the server or hub repository."""

    NOT_SUPPORTED: ClassVar = {"base_model_name": (), "load_inplace": (False,), "is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str


class UnloadRequest(StrictModel):
    """An adapter to unload."""

    IGNORED: ClassVar = frozenset({"lora_int_id"})

    lora_name: str


async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load an adapter, which clients then use as a model."""
    service = _allowed(request)
    if body.lora_name in service.model_names:
        raise ApiError(400, f"lora_name is {body.lora_name!r}, which is a name of the model", param="lora_name")
    try:
        await service.llm.load_adapter(body.lora_name, body.lora_path)
    except AdapterError as error:
        raise ApiError(400, str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(body: UnloadRequest, request: Request) -> Response:
    """Unload an adapter; running requests keep it."""
    service = _allowed(request)
    try:
        await service.llm.unload_adapter(body.lora_name)
    except AdapterError as error:
        raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(request: Request) -> Service:
    """The service, if its operator allows clients to load adapters. Raises `ApiError` (403) if not."""
    service = service_of(request)
    if not service.settings.allow_adapter_loading:
        raise ApiError(403, "clients of this server cannot load adapters (its option --allow-adapter-loading is off)")
    return service
