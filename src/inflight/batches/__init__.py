"""Batch jobs: files of requests whose results survive any end of the process.

`batch` describes a job, `request_lines` reads its input, `database` stores it, with `files` and `ledger`, and `worker`
runs it. Answering a request is left to an `Answerer`.
"""
