"""Batch inference in Ray Data: rows get the output of a single engine, and none is lost or duplicated when processes
are killed."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.scale.ray_cluster import actors, cluster_of, kill, long, ray, until

import pyarrow  # isort: skip
import ray.data  # isort: skip  # after what says why it may be missing
from pyarrow import parquet  # isort: skip
from ray.data.llm import build_processor  # isort: skip

from inflight.scale.data import GenerateText, InflightProcessorConfig

PARAMS = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
WORKER = "MapWorker(MapBatches(_EngineUDF))"


def prompts(number: int) -> list[str]:
    return [f"Once upon a time, there were {each} animals" for each in range(number)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(3) as cluster:
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield cluster


def config(**options: Any) -> InflightProcessorConfig:
    return InflightProcessorConfig(**{"num_cpus": 0.5, "sampling_params": PARAMS, "batch_size": 4} | options)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*.json") for line in file.read_text().splitlines()]


def texts(llm: LLM, number: int) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts(number), SamplingParams(**PARAMS))]


def num_rows_in(folder: Path) -> int:
    """How many lines are written, the last of them maybe in part."""
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("*.json"))


def check(rows: list[dict[str, Any]], expected: list[str]) -> None:
    """Every row is there once, with the right answer."""
    assert sorted(row["id"] for row in rows) == list(range(len(expected)))
    assert [row["generated_text"] for row in sorted(rows, key=lambda row: row["id"])] == expected


@pytest.mark.thorough
def test_what_a_row_may_ask_for(cluster: Any, llm: LLM) -> None:
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema = {"json_schema": json.dumps(shape | {"additionalProperties": False})}
    rows = [
        {"id": 0, "prompt": "Once upon a time", "sampling_params": None},
        {"id": 1, "prompt_token_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_tokens": 3}},
        {"id": 2, "prompt": "The fox", "sampling_params": {"temperature": 1, "seed": 5, "stop": ["."]}},
        {
            "id": 3,
            "prompt": "An owl",
            "sampling_params": {"temperature": 0, "max_tokens": 200, "structured_output": schema},
        },
        {"id": 4, "prompt": ""},
        {"id": 5, "prompt": "A duck", "sampling_params": {"temperature": -1.0}},
    ]
    for row in rows:
        row["sampling_params"] = json.dumps(row["sampling_params"]) if row.get("sampling_params") else None
    processor = build_processor(config(should_continue_on_error=True))
    answered = sorted(processor(ray.data.from_items(rows)).take_all(), key=lambda row: row["id"])
    expected = llm.generate(
        ["Once upon a time", [5, 6, 7], "The fox"],
        [
            SamplingParams(**PARAMS),
            SamplingParams(temperature=0, max_tokens=3),
            SamplingParams(temperature=1, seed=5, stop=["."]),
        ],
    )
    for row, output in zip(answered, expected, strict=False):
        answer = output.outputs[0]
        assert row["generated_text"] == answer.text
        assert list(row["generated_tokens"]) == answer.token_ids
        assert row["finish_reason"] == answer.finish_reason
        assert row["num_input_tokens"] == len(output.prompt_token_ids)
        assert row["num_generated_tokens"] == len(answer.token_ids)
    assert set(json.loads(answered[3]["generated_text"])) == {"a"}
    errors = [row["__inference_error__"] for row in answered]
    assert errors[:4] == [""] * 4
    assert "the prompt is empty" in errors[4]
    assert "temperature is -1.0" in errors[5]

    with pytest.raises(Exception, match="the prompt is empty"):
        build_processor(config())(ray.data.from_items(rows[4:5])).take_all()


@pytest.mark.thorough
def test_the_class_alone(cluster: Any, llm: LLM) -> None:
    rows = [{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts(30))]
    answered = ray.data.from_items(rows).map_batches(
        GenerateText,
        fn_constructor_kwargs={"sampling_params": PARAMS},
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=4),
        num_cpus=1,
    )
    check(answered.take_all(), texts(llm, 30))


def test_wrong_options_are_told_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="did you mean 'max_num_seqs'"):
        config(engine={"max_num_seq": 3})
    with pytest.raises(ValueError, match="model_sourc"):
        config(model_sourc="gpt2")


@long
def test_killed_workers_engines_and_nodes_lose_no_row(cluster: Any, llm: LLM, tmp_path: Path) -> None:
    number = 400
    rows = ray.data.from_items([{"id": each, "prompt": prompt} for each, prompt in enumerate(prompts(number))])
    processor = build_processor(config(concurrency=2, engine={"max_num_seqs": 1}))  # slow, so that there is time

    def has_written(share: float) -> bool:
        return num_rows_in(tmp_path) >= share * number

    with ThreadPoolExecutor() as pool:
        done = pool.submit(lambda: processor(rows).write_json(str(tmp_path)))
        until(lambda: has_written(0.01))
        kill(actors(WORKER)[0].pid)
        until(lambda: has_written(0.2))
        head = ray.get_runtime_context().get_node_id()
        lost = next(each for each in cluster.list_all_nodes() if each.node_id != head)
        cluster.remove_node(lost, False)
        done.result()
    check(
        rows_in(tmp_path),
        texts(llm, number),
    )


JOB = """
import sys
import ray
from ray.data import DataContext
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import build_processor
from inflight.scale.data import InflightProcessorConfig

source, folder, checkpoint, params = sys.argv[1:]
ray.init(address="local", num_cpus=3, log_to_driver=False)
context = DataContext.get_current()
context.enable_progress_bars = False
context.checkpoint_config = CheckpointConfig(id_column="id", checkpoint_path=checkpoint)
processor = build_processor(InflightProcessorConfig(sampling_params=eval(params), batch_size=4))
processor(ray.data.read_parquet(source)).write_json(folder)
"""


@long
def test_a_job_goes_on_where_it_was_after_its_end(llm: LLM, tmp_path: Path) -> None:
    number, folder = 200, tmp_path / "answers"
    source = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"id": range(number), "prompt": prompts(number)}), source)
    command = [sys.executable, "-c", JOB, str(source), str(folder), str(tmp_path / "done"), repr(PARAMS)]
    with subprocess.Popen(command) as first:
        until(lambda: num_rows_in(folder) >= number / 4 or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
    files = set(folder.glob("*.json"))
    subprocess.run(command, check=True)
    assert files & set(folder.glob("*.json"))  # Ray removes one that it had written, but not noted in its checkpoint
    check(rows_in(folder), texts(llm, number))
