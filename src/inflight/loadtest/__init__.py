"""An open-loop load generator for any OpenAI-compatible server: what is asked and when, and how the answers came.

Knows HTTP and nothing of the engine, so that all servers are measured by the same rules. The order of things:
sketches of requests (`sketch`, `files`, `workloads`) get their times (`arrivals`) and, once it is known what the server
takes (`dialect`), their prompts (`prompts`); `runner` sends them and notes when what came; `report` and `figure` tell
it. `load_test` does all of this.
"""
