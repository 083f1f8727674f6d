"""The walk through the code names the files that a token passes through, and their current size."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inflight.execution.kernels import has_panels

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json
from pathlib import Path
import inflight
from tools.reading_path import code_lines, files_on_the_path
root = Path(inflight.__file__).parent
print(json.dumps({str(path.relative_to(root)): code_lines(path) for path in files_on_the_path()}))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not has_panels(torch.float32), reason="elsewhere a token takes another path, without our kernels")
def test_the_walk_follows_the_path_of_a_token() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    told = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", told.split("## Afterwards")[0]))
    expected = {
        name.replace("execution/weights", "weights").replace("execution/attention", "attention") for name in sizes
    }
    assert named - {"attention/reference.py", "tools/reading_path.py"} == expected
    match = re.search(r"([\d,]+) lines of code in (\d+) files", told)
    more = re.search(r"Five more files, ([\d,]+) lines", " ".join(told.split()))
    assert match is not None
    assert more is not None
    numbers = [int(number.replace(",", "")) for number in (match[1], more[1])]
    assert int(match[2]) + 5 == len(sizes)
    assert abs(sum(numbers) - sum(sizes.values())) <= 0.02 * sum(sizes.values()), "run tools/reading_path.py"
