"""Batch jobs: files of requests whose results survive whatever happens to the process.

`batch` is what is known of a job, `request_lines` reads its input, `database` keeps it, with `files` beside it and
`ledger` over it, and `worker` gets it done. How a request is answered is not known here.
"""
