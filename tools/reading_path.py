"""The path of a token: which files run between `LLM.generate` and its text, and how many lines of code they have.

python tools/reading_path.py

Runs the embedded model on a CPU, greedily and sampled, and counts every file of the package of which a function is
called meanwhile. Lines of code are those that are neither blank nor comment nor docstring.
"""

import ast
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

CALLS_KERNELS = ("inflight/execution/attention/cpu_backend.py", "inflight/execution/weights/")
"""What is Python around one call of a kernel: attention over the cache, and prepacked layers."""


def code_lines(path: Path) -> int:
    """Lines of code in a Python file."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in IGNORED]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(docstring_lines(path)))


IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER} | {
    tokenize.INDENT,
    tokenize.DEDENT,
}


def docstring_lines(path: Path) -> Iterator[int]:
    """The lines of all strings that stand alone as statements."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            yield from range(node.lineno, node.end_lineno + 1)


def files_on_the_path() -> list[Path]:
    """The files of the package that `LLM.generate` runs through, in the order in which it first reaches them."""
    import inflight
    from inflight import LLM, SamplingParams

    folder = str(Path(inflight.__file__).parent)
    # A recorded step runs without Python, and there would be nothing to see; drafters are read by themselves.
    llm = LLM(record_forward=False, speculation="off")
    reached: dict[str, None] = {}

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder) and frame.f_code.co_name != "<module>":
            reached.setdefault(frame.f_code.co_filename)

    params = [SamplingParams(temperature=0, max_tokens=8), SamplingParams(max_tokens=8)]
    (session,) = llm._client.sessions().values()
    session.send(lambda: sys.setprofile(observe))  # type: ignore[arg-type]  # in the engine's thread
    llm.stats()
    reached.clear()
    sys.setprofile(observe)
    try:
        llm.generate(["Once upon a time", "One morning"], params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    return [Path(name) for name in reached]


def main() -> None:
    """Print the files and their sizes."""
    import inflight

    root = Path(inflight.__file__).parents[1]
    sizes = {str(path.relative_to(root)): code_lines(path) for path in files_on_the_path()}
    for name, lines in sizes.items():
        print(f"{lines:5}  {name}")
    read = {name: lines for name, lines in sizes.items() if not name.startswith(CALLS_KERNELS)}
    print(f"{sum(sizes.values()):5}  lines of code in {len(sizes)} files")
    print(f"{sum(read.values()):5}  lines of code in {len(read)} files, without those that only call kernels")


if __name__ == "__main__":
    main()
