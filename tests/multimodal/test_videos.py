"""Videos as frames: every form of one, a model that reads them, and requests that have them.

`transformers`' own video processors need torchvision, so one of a few lines stands in for them (`inflight census
--videos` runs the real ones).
"""

import base64
import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.api.errors import InvalidRequestError
from inflight.text import media
from inflight.text.media import open_video
from tests.command import Command, command
from tests.multimodal.models import plain_answer, tiny, with_processor
from tests.multimodal.test_server import TEMPLATE
from tests.server.serving import RunningServer
from tests.text.tokenizers_for_tests import byte_level

__all__ = ["command"]

PATCH, MERGE, TEMPORAL = 8, 2, 2
MARK = "<video>"
CHAT = TEMPLATE.replace("image", "video")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def video(number: int, colours: int = 256) -> NDArray[np.uint8]:
    """Random frames; videos of different numbers differ in size, too."""
    num_frames, height, width = ((2, 16, 32), (6, 32, 16), (4, 16, 16))[number % 3]
    return np.random.default_rng(number).integers(0, colours, (num_frames, height, width, 3), dtype=np.uint8)


class Patches:
    """The part of the processor that reads videos."""

    def to_json_string(self) -> str:
        return "{}"

    def __call__(self, videos: list[NDArray[np.uint8]]) -> BatchFeature:
        patches, sizes = [], []
        for frames in videos:
            num_frames, height, width, _ = frames.shape
            size = num_frames // TEMPORAL, height // PATCH, width // PATCH
            parts = torch.from_numpy(frames).float().div(255).movedim(-1, 1)
            parts = parts.reshape(size[0], TEMPORAL, 3, size[1] // MERGE, MERGE, PATCH, size[2] // MERGE, MERGE, PATCH)
            patches.append(parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(np.prod(size), -1))
            sizes.append(size)
        return BatchFeature({"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(sizes)})


class VideoProcessor(ProcessorMixin):  # type: ignore[misc]
    """Qwen 2 VL's, for videos alone."""

    chat_template = CHAT
    video_token = MARK

    def __init__(self) -> None:
        backend = byte_level().inner.backend_tokenizer
        backend.add_special_tokens([MARK, "<image>"])
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<unk>")
        self.video_token_id = self.tokenizer.convert_tokens_to_ids(MARK)
        self.video_processor = Patches()

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, chat_template=self.chat_template, **options)

    def __call__(self, text: str, videos: Any = (), add_special_tokens: bool = True, **options: Any) -> BatchFeature:
        read = self.video_processor(videos=videos) if len(videos) else BatchFeature()
        pieces = text.split(MARK)
        if len(pieces) != len(videos) + 1:
            raise ValueError(f"{len(pieces) - 1} places, {len(videos)} videos")
        numbers = [int(size.prod()) // MERGE**2 for size in read.get("video_grid_thw", [])]
        whole = pieces[0] + "".join(MARK * n + piece for n, piece in zip(numbers, pieces[1:], strict=True))
        tokens = self.tokenizer(whole, add_special_tokens=add_special_tokens, return_tensors="pt")
        types = 2 * (tokens["input_ids"] == self.video_token_id).int()
        return BatchFeature({**tokens, **read, "mm_token_type_ids": types})


def pair() -> tuple[PreTrainedModel, VideoProcessor]:
    processor = VideoProcessor()

    def change(config: Any) -> None:
        config.text_config.vocab_size = len(processor.tokenizer)
        config.vision_config.patch_size, config.vision_config.spatial_merge_size = PATCH, MERGE
        config.vision_config.temporal_patch_size = TEMPORAL
        config.video_token_id = processor.video_token_id
        config.image_token_id = processor.tokenizer.convert_tokens_to_ids("<image>")

    return tiny("qwen2_vl", change), processor


def plain(model: PreTrainedModel, read: BatchFeature) -> list[int]:
    return plain_answer(copy.deepcopy(model), dict(read), 8)


def test_answers_are_those_of_the_plain_model() -> None:
    model, processor = pair()
    asked = [("Who?", []), (f"What is {MARK} now", [0]), (f"{MARK} and {MARK}?", [1, 2]), (f"What is {MARK} now", [3])]
    prompts = [{"prompt": text, "videos": list(map(video, numbers))} for text, numbers in asked]
    expected = [plain(model, processor(each["prompt"], each["videos"])) for each in prompts]
    assert len({tuple(each) for each in expected}) == 4
    llm = LLM(copy.deepcopy(model), processor, num_blocks=200, block_size=4, max_num_batched_tokens=16)
    assert llm.model_info.executor == "packed"
    assert llm.model_info.input_modalities == ("image", "video")
    for where in ("together", "from the cache"):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected, where
    assert outputs[1].metrics.num_cached_tokens > 8
    assert llm.engine.runner.encoder_outputs.proofs.found["video"].why_generated is None


def test_every_form_of_a_video_is_the_same(tmp_path: Path) -> None:
    frames = np.repeat(video(0, 2)[..., :1] * 255, 3, axis=-1)  # a GIF has few colours
    images = [Image.fromarray(each) for each in frames]
    files = []
    for each in images:
        each.save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    encoded = [base64.b64encode(each).decode() for each in files]
    images[0].save(moving := io.BytesIO(), "GIF", save_all=True, append_images=images[1:])
    (tmp_path / "moving.gif").write_bytes(moving.getvalue())
    (tmp_path / "frame.png").write_bytes(files[0])
    forms = [
        frames,
        list(frames),
        images,
        tuple(files),
        [tmp_path / "frame.png", files[1]],
        f"data:video/jpeg;base64,{','.join(encoded)}",
        moving.getvalue(),
        tmp_path / "moving.gif",
        f"data:image/gif;base64,{base64.b64encode(moving.getvalue()).decode()}",
        Image.open(moving),
    ]
    for form in forms:
        assert np.array_equal(open_video(form), frames)
    assert open_video(files[0]).shape[0] == 1


def test_videos_that_cannot_be_used_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    mp4 = b"\0\0\0\x18ftypmp42" + bytes(64)
    others = video(0)[0], video(1)[0]
    for source, message in (
        ([], "a video has no frames"),
        (list(others), "a video has frames of several sizes"),
        (mp4, "a video cannot be read: it has no format that Pillow knows"),
        (f"data:video/mp4;base64,{base64.b64encode(mp4).decode()}", "a video cannot be read"),
        ("/absent.gif", "a video cannot be read"),
        (42, "a video cannot be read"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            open_video(source)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(media, "MAX_PIXELS", 1000)
    with pytest.raises(InvalidRequestError, match="the frames of a video have more than 1000 pixels"):
        open_video(video(0))


def test_a_chat_over_http_has_videos(tmp_path: Path, command: Command) -> None:
    model, processor = pair()
    frames = video(0)
    files = []
    for each in frames:
        Image.fromarray(each).save(file := io.BytesIO(), "PNG")
        files.append(base64.b64encode(file.getvalue()).decode())
    url = f"data:video/jpeg;base64,{','.join(files)}"
    expected = plain(model, processor(f"<s>user: What is {MARK}</s>", [frames], add_special_tokens=False))
    content = [{"type": "text", "text": "What is "}, {"type": "video", "video": frames}]
    llm = LLM(copy.deepcopy(model), processor, num_blocks=100)
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected

    content[1] = {"type": "video_url", "video_url": {"url": url}}
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"messages": [{"role": "user", "content": content}], **options}
    served = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=100)
    with RunningServer(served, model_name="m") as server:
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected
        content[1] = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
        refused = server.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "a video cannot be read" in refused.json()["error"]["message"]
        Image.fromarray(frames[0]).save(tmp_path / "still.gif")
        encoded = base64.b64encode((tmp_path / "still.gif").read_bytes()).decode()
        content[1] = {"type": "video_url", "video_url": {"url": f"data:image/gif;base64,{encoded}"}}
        said = server.http.post("/v1/chat/completions", json=body).json()["error"]["message"]
        done = command("chat", "--url", server.url, stdin=f"/video {tmp_path / 'still.gif'}\nWhat is\n")
        assert said in done.stderr, "one frame is too few for this processor"


def test_a_model_without_videos_gets_a_text_instead() -> None:
    model, processor = with_processor("llava")
    processor = copy.copy(processor)
    processor.chat_template = TEMPLATE
    with pytest.raises(InvalidRequestError, match="the model's processor reads no videos"):
        LLM(copy.deepcopy(model), processor, num_blocks=100).generate({"prompt": MARK, "videos": [video(0)]})
    llm = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=100)
    with RunningServer(llm, model_name="m") as server:
        part = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-inflight-ignored-fields"] == "video"
