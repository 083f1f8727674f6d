"""Batch jobs over HTTP: OpenAI's Files and Batches APIs, and the answering of a job's requests."""
