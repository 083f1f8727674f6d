"""`form`: describes a multipart form in the OpenAPI document."""

from typing import Any

FILE = {"type": "string", "format": "binary"}


def form(**fields: Any) -> dict[str, Any]:
    """Return the addition to an endpoint's document; all these fields are required."""
    schema = {"type": "object", "required": list(fields), "properties": fields}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
