"""A turn computes the last call and what is new, however long the session is."""

from collections.abc import Iterator

import pytest

from tests.agents.puppet import puppet_server
from tests.agents.session_tokens import APIS, computed
from tests.server.chat_format.templates import TEMPLATES
from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with puppet_server() as server:
        yield server


FORGETFUL = TEMPLATES["hermes"].replace(
    "{% for m in messages %}",
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}",
)
FORGETFUL = "[gMASK]" + FORGETFUL.replace(
    "{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.index0 > ns.last %}"
)
"""Drops the reasoning before the last question."""


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["hermes", "glm-4.7", "minimax-m2", "forgetful"])
def test_a_turn_costs_no_more_than_its_call_and_result(name: str, api: str, server: RunningServer) -> None:
    num_computed = computed(server, {**TEMPLATES, "forgetful": FORGETFUL}[name], api)
    assert len(num_computed) == 10, num_computed
    assert max(num_computed[2:]) <= num_computed[1] + 3 * 16, num_computed  # parts of blocks, and longer words
