"""An open-loop load generator for any OpenAI-compatible server.

Knows HTTP and nothing of the engine, so that all servers are measured by the same rules. Sketches of requests
(`sketch`, `files`, `workloads`) get their times (`arrivals`) and, after the server's supported fields are detected
(`dialect`), their prompts (`prompts`); `runner` sends them, alone or in each of several `processes`, and records when
answers arrive; `report` and `figure` present the result. `load_test` runs all of this.
"""
