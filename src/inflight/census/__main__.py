"""The process of one class: prints its `Finding` as a JSON line; with `--peer` a second one, with the peer's result."""

import argparse
import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def main() -> None:
    """`python -m inflight.census MODEL_TYPE [--peer] [--with images|sounds|videos]`."""
    parser = argparse.ArgumentParser(prog="python -m inflight.census")
    parser.add_argument("model_type")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--with", dest="items", default="")
    arguments = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w")  # only for this module; what model code prints goes to standard error
    os.dup2(2, 1)

    import torch

    from inflight.census.examine import examine

    torch.set_num_threads(1)
    if arguments.items:
        from inflight.census.items import examine_with

        print(examine_with(arguments.items, arguments.model_type).to_json(), file=answer, flush=True)
        os._exit(0)
    finding, model = examine(arguments.model_type)
    print(finding.to_json(), file=answer, flush=True)
    if arguments.peer and model is not None:
        from inflight.census.examine import with_peer

        print(with_peer(model, finding).to_json(), file=answer, flush=True)
    os._exit(0)  # without waiting for threads left by a model or a peer


if __name__ == "__main__":
    main()
