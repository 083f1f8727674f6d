"""Batch inference in Ray Data: rows with prompts in, the same rows with answers out.

With Ray's own way to build processors:

    from inflight.scale.data import InflightProcessorConfig
    from ray.data.llm import build_processor

    config = InflightProcessorConfig(model_source="Qwen/Qwen3-0.6B", sampling_params={"max_tokens": 100}, num_cpus=8)
    answered = build_processor(config)(ray.data.read_json("prompts.jsonl"))

or with the class alone, `dataset.map_batches(GenerateText, ...)`.

Ray retries failures: a killed actor is restarted, and its batches go to another. To resume after the end of the whole
job, set `DataContext.checkpoint_config`: Ray then skips the rows already written.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
import ray.data
from pydantic import Field
from ray.data.llm import Processor, ProcessorConfig
from ray.llm._internal.batch.processor import ProcessorBuilder
from ray.llm._internal.batch.stages.base import StatefulStage, StatefulStageUDF

from inflight.contracts.api.config import engine_config
from inflight.contracts.api.options import refuse_unknown_options
from inflight.host.machine import usable_cores
from inflight.scale.rows import OTHER_COLUMNS, PROMPT_COLUMNS, RowEngine, params_of
from inflight.scale.settings import threads_of

logger = logging.getLogger(__name__)

BATCHES_IN_BLOCK = 8
"""Rows of Ray's unit of work, which is recomputed when an engine is killed. Smaller ones have more overhead."""


class GenerateText(RowEngine):
    """For `Dataset.map_batches`, as a class: an engine that answers the rows of each batch.

    Rows have a column `prompt` (text), `prompt_token_ids` or `messages` (a chat), and maybe `sampling_params` (a dict
    or JSON). They get the columns `generated_text`, `generated_tokens`, `finish_reason`, `num_input_tokens` and
    `num_generated_tokens`. `compute` should be an `ActorPoolStrategy` with `max_concurrent_calls_per_actor`, so that
    the engine always has rows of several batches. Arguments are those of `RowEngine`.
    """

    async def __call__(self, batch: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a batch of rows, given as columns."""
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        answers = dict([answer async for answer in self.answers(rows)])
        new = {name: [answers[number][name] for number in range(len(rows))] for name in answers[0]} if rows else {}
        yield batch | new


class InflightProcessorConfig(ProcessorConfig):
    """The configuration for `ray.data.llm.build_processor`; rows and new columns are those of `GenerateText`.

    Attributes:
        model_source: a hub id, or a folder that every node has; None is the small embedded model.
        tokenizer, sampling_params, engine: as of `RowEngine`.
        concurrency: the number of engines, or the minimum and the maximum.
        batch_size, max_concurrent_batches: rows go to an engine in batches, of which this many are in flight at once.
        num_cpus: CPUs that Ray reserves for each engine, which has as many threads. By default an engine uses all cores
            of the machine on which the processor is built, and one of them is not reserved: otherwise the tasks that
            read and write rows would wait forever.
        should_continue_on_error: whether an invalid row gets the reason in the column `__inference_error__`, instead of
            ending the job.
        resources, runtime_env: of each engine's actor, as everywhere in Ray.
    """

    model_source: str | None = None
    tokenizer: str | None = None
    sampling_params: dict[str, Any] | None = None
    engine: dict[str, Any] = Field(default_factory=dict)
    max_concurrent_batches: int = Field(default=8, ge=1)
    num_cpus: float | None = Field(default=None, gt=0)
    should_continue_on_error: bool = False
    resources: dict[str, float] | None = None
    runtime_env: dict[str, Any] | None = None

    def model_post_init(self, _: object) -> None:
        """Validate options that only actors read."""
        engine_config(self.engine, "the processor's engine")
        params_of(self.sampling_params or {})


class _EngineUDF(StatefulStageUDF):
    def __init__(self, data_column: str, expected_input_keys: list[str] | None = None, **options: Any) -> None:
        super().__init__(data_column, expected_input_keys)
        self._engine = RowEngine(**options)

    async def udf(self, rows: list[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:  # type: ignore[override]
        """Answer rows, in any order."""
        async for number, columns in self._engine.answers(rows):
            yield columns | {self.IDX_IN_BATCH_COLUMN: rows[number][self.IDX_IN_BATCH_COLUMN]}


class _EngineStage(StatefulStage):
    fn: type[StatefulStageUDF] = _EngineUDF

    def get_optional_input_keys(self) -> dict[str, str]:
        """Columns with descriptions. None of them alone is required."""
        return PROMPT_COLUMNS | OTHER_COLUMNS


class _Processor(Processor):
    def __init__(self, least_cpus: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._least_cpus = least_cpus

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """The answered dataset. Ray's units of work are a few batches, which are lost when an engine is killed."""
        self._check_cpus()
        rows = BATCHES_IN_BLOCK * self.config.batch_size
        return super().__call__(dataset.repartition(target_num_rows_per_block=rows))

    def _check_cpus(self) -> None:
        """Warn if the engines take all CPUs of the cluster: the job would wait forever."""
        if not ray.is_initialized():
            return
        taken = self._least_cpus
        there: float = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
        others = 1 if ray.data.DataContext.get_current().checkpoint_config is None else 2
        if there - taken < others:
            logger.warning(
                "%g of the cluster's %g CPUs are set aside for engines, and the job may wait forever: what reads and "
                "writes rows, and checkpoints, needs %d more; give the processor less num_cpus, or less concurrency",
                taken,
                there,
                others,
            )


def _build(
    config: InflightProcessorConfig,
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    postprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **map_options: Any,
) -> Processor:
    refuse_unknown_options(map_options, ["preprocess_map_kwargs", "postprocess_map_kwargs"], "the processor")
    cores = usable_cores()
    num_cpus = cores - 1 if config.num_cpus is None else config.num_cpus
    threads = {"num_threads": threads_of(config.engine, cores)} if config.num_cpus is None else {}
    pool: dict[str, Any] = config.get_concurrency(autoscaling_enabled=False)
    stage = _EngineStage(
        fn_constructor_kwargs={
            "model": config.model_source,
            "tokenizer": config.tokenizer,
            "sampling_params": config.sampling_params,
            "engine": threads | config.engine,
            "keeps_errors": config.should_continue_on_error,
        },
        map_batches_kwargs={
            "compute": ray.data.ActorPoolStrategy(**pool, max_concurrent_calls_per_actor=config.max_concurrent_batches),
            "num_cpus": num_cpus,
            "resources": config.resources,
            "runtime_env": config.runtime_env,
        },
    )
    return _Processor(num_cpus * min(pool.values()), config, [stage], preprocess, postprocess, **map_options)


ProcessorBuilder.register(InflightProcessorConfig, _build)
