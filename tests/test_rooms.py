"""The core is independent: `LLM` works without the packages around it and without the grammar library."""

import subprocess
import sys

AROUND = ("cli", "server", "census", "lessons", "loadtest", "openai_client", "profiling", "simulate")

SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"there is no {name}")

MISSING = set(sys.argv[1:])
sys.meta_path.insert(0, Missing())

from inflight import LLM, SamplingParams

(output,) = LLM().generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].text
import inflight.entrypoints.async_llm, inflight.entrypoints.callback_llm
assert not MISSING & sys.modules.keys()
"""


def test_the_core_works_without_the_packages_around_it() -> None:
    missing = [f"inflight.{name}" for name in AROUND] + ["llguidance"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *missing], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
