"""The `inflight` command: one module per sub-command, no logic of its own."""

import sys

import click

from inflight import __version__
from inflight.cli.batch import batch
from inflight.cli.bench import bench
from inflight.cli.cache import cache
from inflight.cli.census import census
from inflight.cli.chat import chat
from inflight.cli.demo import demo
from inflight.cli.generate import generate
from inflight.cli.help import Group
from inflight.cli.info import info, prepare
from inflight.cli.profile import profile
from inflight.cli.quantize import quantize
from inflight.cli.race import race
from inflight.cli.serve import serve
from inflight.cli.show import show
from inflight.cli.simulate import simulate
from inflight.cli.trace import trace
from inflight.host.garbage_collection import exit_without_garbage_collection
from inflight.host.lean_imports import import_leanly

HEADINGS = {
    "Run a model": ("generate", "batch", "chat", "serve", "info", "prepare", "quantize", "cache"),
    "See how it works": ("demo", "show", "race", "trace"),
    "Measure and plan": ("bench", "profile", "simulate", "census"),
}


@click.group(
    cls=Group,
    headings=HEADINGS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
)
@click.version_option(__version__, prog_name="inflight")
def app() -> None:
    """Continuous batching for Hugging Face causal language models.

    Where a command runs a model, `-m MODEL` names it: a hub id, a folder or a GGUF file; without it the small embedded
    model runs.
    """


COMMANDS = (
    generate,
    batch,
    serve,
    chat,
    info,
    prepare,
    quantize,
    cache,
    demo,
    show,
    race,
    bench,
    profile,
    trace,
    simulate,
    census,
)
for command in COMMANDS:
    app.add_command(command)


def main() -> None:
    """Run the command line. A user's mistake prints one sentence and exits with 2; Ctrl-C exits with 130."""
    import_leanly()
    try:
        app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ValueError as error:
        print(f"inflight: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        print("inflight: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    finally:
        exit_without_garbage_collection()
