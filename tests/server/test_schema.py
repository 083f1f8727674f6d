"""The served OpenAPI document, and schemathesis tests of it: no request is answered with a 5xx status."""

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.serving import RunningServer

NUM_EXAMPLES = 5
"""The number of requests for each endpoint, once valid and once invalid."""


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.thorough("negative")
def test_no_input_is_the_servers_fault(server: RunningServer, mode: GenerationMode) -> None:
    server.complete(prompt="a", max_tokens=1)  # this loads the model
    ask_anything(server.url, mode)


def ask_anything(url: str, mode: GenerationMode, num_examples: int = NUM_EXAMPLES) -> None:
    """Send each endpoint of a server this number of requests that its document allows, or does not allow."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    num_answers = 0

    def check(operation: Any) -> None:
        @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            nonlocal num_answers
            response = case.call(session=session, timeout=100)
            num_answers += 1
            assert response.status_code < 500, (case.path, case.body, response.text)
            if response.status_code >= 400:
                assert "error" in response.json(), (case.path, case.body, response.text)

        ask()

    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.body or mode is GenerationMode.POSITIVE:  # a plain GET cannot be wrong
                check(operation)
    assert num_answers > num_examples


def test_the_document_describes_the_accepted_fields(server: RunningServer) -> None:
    document = server.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"} <= set(document["paths"])
    completion = document["components"]["schemas"]["CompletionRequest"]
    assert completion["required"] == ["prompt"]
    assert completion["additionalProperties"] is False
    assert "suffix" not in completion["properties"]
