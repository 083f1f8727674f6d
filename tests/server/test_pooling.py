"""Embeddings, reranking, scores and labels over HTTP, with OpenAI's client and plain requests."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from inflight import LLM, AsyncLLM
from inflight.batches.batch import Batch
from inflight.contracts.step.plan import StepPlan
from inflight.execution.model_runner import ModelRunner
from inflight.execution.pooling.heads import TextPooler
from inflight.server.app import create_app
from inflight.server.batches.answering import AppAnswerer
from inflight.server.serving.settings import ServerSettings
from tests.batches.jobs import Jobs
from tests.pooling.checkpoints import classifier, make_model, make_tokenizer, save, words
from tests.server.serving import RunningServer, raw_request

BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "w9"},
    "/pooling": {"input": "w9"},
    "/v1/rerank": {"query": "w9", "documents": ["w10"]},
    "/v1/score": {"text_1": "w9", "text_2": "w10"},
    "/classify": {"input": "w9"},
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    return save(make_model("bert"), folder, "bert", pooling={"pooling_mode": "mean"}, prompts={"query": "w11 "})


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(classifier("bert", 1), tmp_path_factory.mktemp("reranker"), "bert")


@pytest.fixture(scope="module")
def embedder(bert: str) -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(bert), model_name="bert") as server:
        yield server


@pytest.fixture(scope="module")
def ranker(reranker: str) -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(reranker), model_name="ranker") as server:
        yield server


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which must be a good one."""
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def error_of(server: RunningServer, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# ------------------------------------------------------------------------------------------ embeddings


def test_lines_of_batch_jobs_are_embedded(bert: str, tmp_path: Path) -> None:
    texts = words(3, 7)
    bodies = [{"model": "bert", "input": text} for text in texts]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body})
        for number, body in enumerate([*bodies, {"model": "bert", "prompt": "w9"}])
    ]
    jobs = Jobs(tmp_path, time.time)

    async def work() -> Batch:
        async with AsyncLLM(bert) as llm:
            answerer = AppAnswerer(create_app(llm, ServerSettings(model_name="bert")), llm)
            job = jobs.create("\n".join(lines).encode(), endpoint="/v1/embeddings")
            assert await jobs.worker(answerer, 8).work_on_next()
        return job

    job = jobs.get(asyncio.run(work()))
    results, errors = jobs.lines(job.output_file_id), jobs.lines(job.error_file_id)
    given = [result["response"]["body"]["data"][0]["embedding"] for result in results]
    assert np.array_equal(np.float32(given), [np.asarray(output.embedding) for output in LLM(bert).embed(texts)])
    assert [error["custom_id"] for error in errors] == ["2"]
    jobs.database.close()


def test_openais_client_gets_what_llm_gives(embedder: RunningServer, bert: str) -> None:
    """The client asks for base64 by itself."""
    texts = words(3, 40, 1)
    outputs = LLM(bert).embed(texts)
    answer = embedder.client.embeddings.create(model="bert", input=texts)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert [np.float32(each.embedding).tolist() for each in answer.data] == [list(each.embedding) for each in outputs]
    num_tokens = sum(each.num_prompt_tokens for each in outputs)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    assert (answer.model, answer.object, answer.data[0].object) == ("bert", "list", "embedding")


def test_input_may_be_a_text_token_ids_or_lists_of_them(embedder: RunningServer) -> None:
    text, other = words(5, 9)
    ids, other_ids = (make_tokenizer()(each)["input_ids"] for each in (text, other))

    def vectors(given: Any) -> list[list[float]]:
        return [each["embedding"] for each in post(embedder, "/v1/embeddings", input=given)["data"]]

    both = vectors([text, other])
    assert vectors(text) == vectors(ids) == vectors([ids]) == both[:1]
    assert vectors([ids, other_ids]) == both


def test_vectors_come_as_numbers_or_in_base64(embedder: RunningServer) -> None:
    (text,) = words(7)
    numbers = post(embedder, "/v1/embeddings", input=text, encoding_format="float")["data"][0]["embedding"]
    encoded = post(embedder, "/v1/embeddings", input=text, encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == numbers


def test_dimensions_prompts_and_truncation(embedder: RunningServer, bert: str) -> None:
    (text,), llm = words(140), LLM(bert)
    options = {"dimensions": 10, "truncate_prompt_tokens": -1, "prompt_name": "query"}
    answer = post(embedder, "/v1/embeddings", input=text, **options)
    (output,) = llm.embed(text, **options)  # type: ignore[arg-type]
    assert answer["data"][0]["embedding"] == list(output.embedding)
    assert answer["usage"]["total_tokens"] == 128


def test_pooling_answers_as_vllm_does(embedder: RunningServer, ranker: RunningServer) -> None:
    (text,) = words(6)
    answer = post(embedder, "/pooling", input=[text])
    assert answer["data"][0]["object"] == "pooling"
    assert answer["data"][0]["data"] == post(embedder, "/v1/embeddings", input=text)["data"][0]["embedding"]
    probs = post(ranker, "/classify", input=text)["data"][0]["probs"]
    assert post(ranker, "/pooling", input=text)["data"][0]["data"] == probs


# ---------------------------------------------------------------------------------- scores and labels


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(ranker: RunningServer, reranker: str, path: str) -> None:
    query, *documents = words(4, 20, 9, 30)
    scores = [output.score for output in LLM(reranker).score(query, documents)]
    given: list[Any] = [documents[0], {"text": documents[1]}, documents[2]]
    answer = post(ranker, path, model="ranker", query=query, documents=given, top_n=2, return_documents=True)
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    expected = [
        {"index": index, "relevance_score": scores[index], "document": {"text": documents[index]}} for index in best
    ]
    assert answer["results"] == expected
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 0
    assert "document" not in post(ranker, path, query=query, documents=documents)["results"][0]


def test_pairs_get_scores(ranker: RunningServer, reranker: str) -> None:
    one, two, three = words(4, 20, 9)
    scores = [output.score for output in LLM(reranker).score([one, two], [two, three])]
    answer = post(ranker, "/v1/score", text_1=[one, two], text_2=[two, three])
    assert [each["score"] for each in answer["data"]] == scores
    assert post(ranker, "/v1/score", text_1=one, text_2=two)["data"][0]["score"] == scores[0]


def test_embeddings_are_ranked_by_their_cosine(embedder: RunningServer, bert: str) -> None:
    query, *documents = words(4, 20, 9)
    scores = [output.score for output in LLM(bert).score(query, documents)]
    results = post(embedder, "/rerank", query=query, documents=documents)["results"]
    assert {each["index"]: each["relevance_score"] for each in results} == dict(enumerate(scores))


def test_labels_have_probabilities(ranker: RunningServer, reranker: str) -> None:
    (text,) = words(8)
    (output,) = LLM(reranker).classify(text)
    (label,) = post(ranker, "/classify", input=text)["data"]
    assert label == {"index": 0, "label": "LABEL_0", "probs": list(output.probs), "num_classes": 1}


# --------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", "input: the text is empty"),
        ({"input": []}, "input", "input has 0 texts; it must have from 1 to 2048"),
        ({"input": ["w9"] * 2049}, "input", "input has 2049 texts"),
        ({"input": ["w9", ""]}, "input", "input: text 1: the text is empty"),
        ({"input": [300]}, "input", "token id 300 is out of range"),
        ({"input": "w9", "dimensions": 100}, "input", "dimensions is 100; this model's vectors have 64"),
        ({"input": "w9", "truncate_prompt_tokens": 0}, "input", "truncate_prompt_tokens is 0"),
        ({"input": "w9", "prompt_name": "x"}, "input", "prompt_name is 'x'"),
        ({"input": {"a": 1}}, "input", "input is"),
        ({}, "input", "input is missing"),
        ({"input": "w9", "dimension": 3}, "dimension", "dimension"),
        ({"input": "w9", "stream": True}, "stream", "stream"),
    ],
)
def test_wrong_requests_are_refused_by_name(
    embedder: RunningServer, body: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(embedder, "/v1/embeddings", **body)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_long_text_has_openais_code(embedder: RunningServer) -> None:
    error = error_of(embedder, "/v1/embeddings", input=words(140)[0])
    assert error["code"] == "context_length_exceeded"


def test_another_models_name_is_not_found(embedder: RunningServer) -> None:
    assert error_of(embedder, "/v1/embeddings", 404, model="other", input="w9")["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "w9"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w9"}]}),
        ("/v1/responses", {"input": "w9"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "w9"}], "max_tokens": 3}),
    ],
)
def test_a_model_that_pools_generates_nothing(embedder: RunningServer, path: str, body: dict[str, Any]) -> None:
    response = embedder.http.post(path, json={"model": "bert", **body})
    assert response.status_code == 400
    assert "this model was loaded to embed; it does not generate text" in response.text


@pytest.mark.parametrize("path", BODIES)
def test_a_model_that_generates_pools_nothing(server: RunningServer, path: str) -> None:
    assert "generates text; it" in error_of(server, path, **BODIES[path])["message"]


def test_what_the_model_was_not_loaded_for_is_refused(embedder: RunningServer, ranker: RunningServer) -> None:
    assert "it classifies nothing" in error_of(embedder, "/classify", input="w9")["message"]
    assert "it embeds nothing" in error_of(ranker, "/v1/embeddings", input="w9")["message"]


# ------------------------------------------------------------------------------------- running requests


def test_requests_are_told_to_the_observer(embedder: RunningServer) -> None:
    embedder.observer.take_reasons()
    post(embedder, "/v1/embeddings", input="w9")
    error_of(embedder, "/v1/embeddings", input="")
    assert embedder.observer.take_reasons() == ["stop", "refused"]
    assert embedder.http.get("/v1/models").json()["data"][0]["max_model_len"] == 128


class _Held:
    """A model in a thread of this process whose steps wait until they may run."""

    def __init__(self) -> None:
        self.has_begun, self.may_run = threading.Event(), threading.Event()
        self._run = ModelRunner.run

    def run(self, runner: ModelRunner, plan: StepPlan, masks: Any) -> Any:
        self.has_begun.set()
        assert self.may_run.wait(60)
        return self._run(runner, plan, masks)


@pytest.fixture
def held(bert: str) -> Iterator[tuple[RunningServer, _Held]]:
    held = _Held()
    with RunningServer(AsyncLLM(bert, in_process=True), model_name="bert") as server:
        post(server, "/v1/embeddings", input="w9")
        server.observer.take_reasons()
        with mock.patch.object(ModelRunner, "run", lambda *call: held.run(*call)):
            yield server, held
            held.may_run.set()
        server.check_idle()


def test_a_request_that_takes_too_long_is_a_504(held: tuple[RunningServer, _Held]) -> None:
    server, _ = held
    object.__setattr__(server.app.state.service.settings, "request_timeout", 0.05)
    assert error_of(server, "/v1/embeddings", 504, input="w9")["code"] == "timeout"
    assert server.observer.take_reasons() == ["timeout"]


def test_a_client_that_leaves_aborts_its_request(held: tuple[RunningServer, _Held]) -> None:
    server, holding = held
    with server.connection() as connection:
        connection.sendall(raw_request("/v1/embeddings", json.dumps({"input": ["w9"] * 5}).encode()))
        assert holding.has_begun.wait(60)
    assert server.observer.has_ended.wait(60)
    assert server.observer.take_reasons() == ["abort"]


def test_a_draining_server_aborts_requests(held: tuple[RunningServer, _Held]) -> None:
    server, holding = held
    service = server.app.state.service
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(error_of(server, "/v1/embeddings", 503, input="w9")))
    asking.start()
    assert holding.has_begun.wait(60)
    (task,) = service.pooling
    task.get_loop().call_soon_threadsafe(task.cancel)
    asking.join()
    assert answers[0]["code"] == "aborted"


def test_a_step_that_fails_is_a_500(bert: str) -> None:
    with RunningServer(AsyncLLM(bert, in_process=True), model_name="bert") as server:
        post(server, "/v1/embeddings", input="w9")
        with mock.patch.object(TextPooler, "pool", side_effect=ValueError("broken")):
            assert "broken" in error_of(server, "/v1/embeddings", 500, input="w9")["message"]
        post(server, "/v1/embeddings", input="w9")


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("served", ["embedder", "ranker"])
def test_no_input_is_the_servers_fault(served: str, mode: GenerationMode, request: pytest.FixtureRequest) -> None:
    server: RunningServer = request.getfixturevalue(served)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    def check(operation: Any) -> None:
        @settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(session=session, timeout=100)
            assert response.status_code < 500, (case.path, case.body, response.text)

        ask()

    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path in BODIES:
                check(operation)
